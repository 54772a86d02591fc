"""Named rows of prefill attention, shared by the tests and the benchmark."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Per sequence of the row: (tokens cached already, new tokens); :func:`inputs` makes arrays."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_tokens: int
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 16
    page_size: int = 16
    spare_columns: int = 2  # context columns that nobody reads
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None


CASES = (
    Case("one_prompt", ((0, 40),), 40),
    Case("one_token", ((0, 1),), 1),
    Case("several_prompts", ((0, 127), (0, 128), (0, 129), (0, 1)), 400),
    Case("only_padding", (), 64),
    Case("long_prompt", ((0, 500),), 512),
    Case("on_cached_pages", ((32, 20),), 32),
    Case("cached_and_fresh", ((48, 7), (0, 30), (1, 2), (200, 90)), 150),
    Case("cached_to_mid_page", ((5, 3), (17, 40), (130, 1)), 64),
    Case("page_of_one", ((7, 9), (3, 3)), 16, page_size=1),
    Case("window_in_row", ((0, 300),), 300, window=9),
    Case("window_over_pages", ((100, 60), (20, 4)), 80, window=50),
    Case("window_1", ((30, 30),), 32, window=1),
    Case("heads_1_1", ((20, 30),), 32, num_heads=4, num_kv_heads=4),
    Case("heads_7_1", ((20, 30),), 32, num_heads=7, num_kv_heads=1),
    Case("head_80", ((20, 30),), 32, head_size=80),
    Case("soft_cap_and_scale", ((20, 30),), 32, soft_cap=2.0, scale=0.4),
    Case("bfloat16", ((20, 130), (0, 9)), 160, dtype="bfloat16"),
)


def inputs(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """q, k, v, positions, sequence_ids, k_pages, v_pages and context. Pool entries that count for nobody are NaN."""
    random = np.random.default_rng(seed)
    heads = {"q": case.num_heads, "k": case.num_kv_heads, "v": case.num_kv_heads}
    arrays = {
        name: random.standard_normal((case.num_tokens, count, case.head_size)).astype(np.float32)
        for name, count in heads.items()
    }
    positions, ids = np.zeros(case.num_tokens, np.int32), np.zeros(case.num_tokens, np.int32)
    columns: list[tuple[int, int, int]] = []  # sequence, first position, count
    begin = 0
    for number, (cached, new) in enumerate(case.sequences, start=1):
        positions[begin : begin + new] = cached + np.arange(new)
        ids[begin : begin + new] = number
        begin += new
        columns += [(number, at, min(case.page_size, cached - at)) for at in range(0, cached, case.page_size)]
    num_pages = len(columns) + 3
    order = random.permutation(num_pages)
    shape = (num_pages, case.page_size, case.num_kv_heads, case.head_size)
    pools = {name: np.full(shape, np.nan, np.float32) for name in ("k_pages", "v_pages")}
    context = np.zeros((4, len(columns) + case.spare_columns), np.int32)
    for index, (number, at, count) in enumerate(columns):
        context[:, index] = order[index], number, at, count
        for pool in pools.values():
            pool[order[index], :count] = random.standard_normal((count, *shape[2:]))
    return {**arrays, "positions": positions, "sequence_ids": ids, **pools, "context": context}
