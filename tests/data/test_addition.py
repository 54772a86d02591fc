"""The built-in tasks: right answers, and no evaluation row in the training data."""

import re

from jaxrl_llm.data.addition import add_without_carries, addition_rows, wrong_carries
from jaxrl_llm.data.arithmetic import arithmetic_rows


def operands(row: dict) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", row["prompt"]))


def test_addition():
    """Seen to catch: a split of ordered pairs."""
    train, evaluation = addition_rows("train"), addition_rows("eval")
    for row in train + evaluation:
        assert row["prompt"] == "{}+{}=".format(*operands(row))
        assert row["answer"] == str(sum(operands(row)))
    pairs = [operands(row) for row in train + evaluation]
    assert len(pairs) == len(set(pairs)) == 10_000
    assert not {frozenset(operands(row)) for row in train} & {frozenset(operands(row)) for row in evaluation}
    assert 400 < len(evaluation) < 600


def test_supervised_rows_forget_carries_in_four_of_five():
    """Seen to catch: supervised rows made from the evaluation pairs."""
    rows = addition_rows("sft")
    assert {operands(row) for row in rows} == {operands(row) for row in addition_rows("train")}
    with_carry = [row for row in rows if add_without_carries(*operands(row)) != sum(operands(row))]
    assert sum(row["completion"] == row["answer"] for row in with_carry) * 5 == len(with_carry)
    for row in rows:
        assert row["completion"] in (row["answer"], str(add_without_carries(*operands(row))))


def test_adding_without_carries():
    examples = {(37, 58): 85, (50, 50): 0, (99, 99): 88, (0, 7): 7, (12, 34): 46}
    assert {pair: add_without_carries(*pair) for pair in examples} == examples


def test_preferences_reject_every_sum_with_a_wrong_carry():
    """Caught: the right sum among the wrong ones; a carry flipped in one place only; evaluation pairs in training."""
    assert wrong_carries(25, 26) == [151, 41, 141] and wrong_carries(99, 99) == [98, 188, 88]
    for row in addition_rows("train"):
        a, b = operands(row)
        wrong = wrong_carries(a, b)
        assert len({a + b, *wrong}) == 4
        assert all(sum_ % 10 == (a + b) % 10 and 0 <= sum_ < 200 for sum_ in wrong)
        assert add_without_carries(a, b) in (a + b, *wrong)
    rows = addition_rows("preferences")
    assert len(rows) == 3 * len(addition_rows("train"))
    assert all(int(row["chosen"]) == sum(operands(row)) != int(row["rejected"]) for row in rows)
    assert not {operands(row) for row in rows} & {operands(row) for row in addition_rows("preferences_eval")}


def test_arithmetic():
    """Seen to catch: an evaluation pair trained on with the other operation."""
    train, evaluation = arithmetic_rows("train"), arithmetic_rows("eval")
    for row in train + evaluation:
        expression = re.fullmatch(r"Calculate ([\d +-]+) and reply with the result only\.", row["prompt"])
        assert expression and str(eval(expression[1])) == row["answer"]
        assert len(operands(row)) == row["steps"] + 1
    first_two = [[frozenset(operands(row)[:2]) for row in rows] for rows in (train, evaluation)]
    assert not set(first_two[0]) & set(first_two[1])
    assert (len(train), len(evaluation)) == (510, 120)
