"""Functions that the tests of the pool load by path."""


def first_letter(completion: str, letter: str = "a") -> float:
    return float(completion.startswith(letter))


def verl_style(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "source_length": len(data_source)}
