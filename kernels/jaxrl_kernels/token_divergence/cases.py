"""Named shapes shared by the test and a benchmark."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """R rows of T tokens; V entries of the student and U of the teacher, of which `vocab_size` are real.

    Attributes:
      widths: hidden size of the student and the teacher.
      weight_rows: V and U.
      counted: share of the tokens in the mask.
      k: candidates of the top-k form.
    """

    name: str
    num_rows: int
    num_tokens: int
    widths: tuple[int, int]
    weight_rows: tuple[int, int]
    vocab_size: int
    chunk_tokens: int
    counted: float
    k: int = 5
    dtype: str = "float32"


CASES = (
    Case("one_chunk", 2, 12, (16, 16), (40, 40), 40, 64, 0.5),
    Case("ragged_chunks", 3, 17, (16, 24), (40, 40), 40, 15, 0.5),
    Case("student_padded_more", 2, 12, (16, 8), (48, 44), 41, 8, 0.5),
    Case("teacher_padded_more", 2, 12, (16, 8), (44, 48), 41, 8, 0.5),
    Case("everything_counts", 2, 16, (24, 24), (64, 64), 64, 8, 1.0, k=1),
    Case("nothing_counts", 2, 16, (24, 24), (64, 64), 64, 8, 0.0),
    Case("all_are_candidates", 1, 9, (16, 16), (12, 12), 12, 4, 0.7, k=12),
    Case("bfloat16", 2, 12, (64, 32), (40, 40), 40, 8, 0.5, dtype="bfloat16"),
)
