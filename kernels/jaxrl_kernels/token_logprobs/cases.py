"""Named shapes shared by the test and a benchmark."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """R rows of T tokens, width D, V entries of which `vocab_size` are real; `counted` of the tokens in the mask."""

    name: str
    num_rows: int
    num_tokens: int
    width: int
    weight_rows: int
    vocab_size: int
    chunk_tokens: int
    counted: float
    dtype: str = "float32"


CASES = (
    Case("one_chunk", 2, 12, 16, 40, 40, 64, 0.5),
    Case("ragged_chunks", 3, 17, 16, 40, 40, 15, 0.5),
    Case("chunk_of_one_token_per_row", 4, 9, 16, 40, 40, 1, 0.7),
    Case("padded_vocabulary", 2, 12, 16, 48, 41, 8, 0.5),
    Case("everything_counts", 2, 16, 24, 64, 64, 8, 1.0),
    Case("nothing_counts", 2, 16, 24, 64, 64, 8, 0.0),
    Case("one_row", 1, 33, 16, 40, 40, 8, 0.3),
    Case("bfloat16", 2, 12, 64, 40, 40, 8, 0.5, "bfloat16"),
)

VOCAB_CHUNKS = (0, 8, 7)
"""For every case: the whole vocabulary, slices that divide it, and slices of which the last two share entries."""
