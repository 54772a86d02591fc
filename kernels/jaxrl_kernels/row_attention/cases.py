"""Named rows of packed attention, shared by the tests and the benchmark."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of shared prompts: per row a list of ``(prompt tokens, completion tokens...)``; :func:`inputs` makes arrays.

    A prompt without completions is an ordinary sequence. Rows are padded to ``num_tokens``.
    """

    name: str
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    num_tokens: int
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 16
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None


CASES = (
    Case("one_sequence", rows=(((64,),),), num_tokens=64),
    Case("one_token", rows=(((1,),),), num_tokens=1),
    Case("shorter_than_a_block", rows=(((9,), (4,)),), num_tokens=17),
    Case("block_edges", rows=(((63,), (64,), (65,)), ((128,), (1,), (2,))), num_tokens=200),
    Case("empty_row", rows=(((100,),), ()), num_tokens=130),
    Case("one_long_sequence", rows=(((450,),),), num_tokens=450),
    Case("shared_prompt", rows=(((64, 64, 64, 64), (30,)),), num_tokens=300),
    Case("ragged_groups", rows=(((70, 5, 90, 1), (3, 64, 10)), ((1, 1, 1, 1),)), num_tokens=260),
    Case("long_prompt", rows=(((200, 20, 30, 40),),), num_tokens=300),
    Case("window_1", rows=(((70,), (3,)),), num_tokens=80, window=1),
    Case("window_inside_block", rows=(((150,), (3,)),), num_tokens=160, window=9),
    Case("window_of_blocks", rows=(((250,),),), num_tokens=256, window=64),
    Case("window_over_shared_prompt", rows=(((100, 40, 70), (5, 6)),), num_tokens=230, window=50),
    Case("heads_1_1", rows=(((40, 50),),), num_tokens=96, num_heads=4, num_kv_heads=4),
    Case("heads_7_1", rows=(((40, 50),),), num_tokens=96, num_heads=7, num_kv_heads=1),
    Case("head_80", rows=(((40, 50),),), num_tokens=96, head_size=80),
    Case("soft_cap_and_scale", rows=(((40, 50, 60),),), num_tokens=160, soft_cap=2.0, scale=0.5),
    Case("bfloat16", rows=(((40, 50, 60),),), num_tokens=160, dtype="bfloat16"),
)


def tokens_of(case: Case) -> dict[str, np.ndarray]:
    """positions, segment_ids and prefix_ids, int32 ``[R, T]``."""
    shape = (len(case.rows), case.num_tokens)
    fields = {name: np.zeros(shape, np.int32) for name in ("positions", "segment_ids", "prefix_ids")}
    for row, groups in enumerate(case.rows):
        column, segment = 0, 0
        for prompt, *completions in groups:
            segment += 1
            shared = segment
            where = slice(column, column + prompt)
            fields["positions"][row, where] = np.arange(prompt)
            fields["segment_ids"][row, where] = shared
            column += prompt
            for length in completions:
                segment += 1
                where = slice(column, column + length)
                fields["positions"][row, where] = prompt + np.arange(length)
                fields["segment_ids"][row, where] = segment
                fields["prefix_ids"][row, where] = shared
                column += length
        assert column <= case.num_tokens, f"{case.name}: row {row} holds {column} tokens"
    return fields


def inputs(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """q, k and v in float32 and the fields of :func:`tokens_of`."""
    random = np.random.default_rng(seed)
    shape = (len(case.rows), case.num_tokens)
    heads = {"q": case.num_heads, "k": case.num_kv_heads, "v": case.num_kv_heads}
    arrays = {
        name: random.standard_normal((*shape, count, case.head_size)).astype(np.float32)
        for name, count in heads.items()
    }
    return {**arrays, **tokens_of(case)}
