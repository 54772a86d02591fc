"""Named shapes of paged decode attention, shared by the tests and the benchmark."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape; :func:`inputs` makes its arrays."""

    name: str
    lengths: tuple[int, ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 64
    page_size: int = 16
    extra_columns: int = 1  # page-table columns beyond the longest sequence
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None


CASES = (
    Case("idle_and_first_token", lengths=(0, 1, 0, 2)),
    Case("page_edges", lengths=(15, 16, 17, 31, 32, 33)),
    Case("all_idle", lengths=(0, 0, 0)),
    Case("no_spare_column", lengths=(48, 7), extra_columns=0),
    Case("page_of_one", lengths=(1, 5, 9), page_size=1),
    Case("page_of_eight", lengths=(8, 9, 0, 63), page_size=8),
    Case("heads_1_1", lengths=(33, 5), num_heads=4, num_kv_heads=4),
    Case("heads_3_1", lengths=(33, 5), num_heads=9, num_kv_heads=3),
    Case("heads_7_1", lengths=(33, 5), num_heads=14, num_kv_heads=2),
    Case("head_80", lengths=(33, 0, 16), head_size=80),
    Case("head_96", lengths=(33, 0, 16), head_size=96),
    Case("head_128", lengths=(33, 0, 16), head_size=128),
    Case("window_1", lengths=(1, 16, 17, 0), window=1),
    Case("window_3", lengths=(2, 3, 4, 50, 0), window=3),
    Case("window_inside_page", lengths=(15, 16, 40, 64), window=9),
    Case("window_of_pages", lengths=(31, 32, 33, 80), window=32),
    Case("window_wider_than_all", lengths=(5, 33), window=4096),
    Case("soft_cap", lengths=(17, 3), soft_cap=5.0),
    Case("scale", lengths=(17, 3), scale=0.3),
    Case("window_soft_cap_scale", lengths=(70, 3, 0), window=20, soft_cap=3.0, scale=0.2),
    Case("bfloat16", lengths=(0, 1, 16, 33), dtype="bfloat16"),
    Case("bfloat16_window", lengths=(0, 1, 16, 90), dtype="bfloat16", window=20),
)


def inputs(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """q, k_pages, v_pages, page_table and lengths of a case, pages scattered and everything unused NaN.

    Every entry of the pool that no sequence may see is NaN, those before its window included, so an implementation
    that reads one shows it.
    """
    import ml_dtypes  # comes with jax

    random = np.random.default_rng(seed)
    dtype = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.dtype(case.dtype)
    counts = [-(-length // case.page_size) for length in case.lengths]
    columns = max(max(counts) + case.extra_columns, 1)
    num_pages = sum(counts) + 3
    order = random.permutation(num_pages)
    shape = (num_pages, case.page_size, case.num_kv_heads, case.head_size)
    pools = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    table = np.full((len(counts), columns), order[-1], np.int32)  # the filler page is NaN too
    used = 0
    for row, (count, length) in enumerate(zip(counts, case.lengths, strict=True)):
        table[row, :count] = order[used : used + count]
        used += count
        first = 0 if case.window is None else max(0, length - case.window)
        for position in range(first, length):
            where = table[row, position // case.page_size], position % case.page_size
            for pool in pools:
                pool[where] = random.standard_normal(shape[2:])
    q = random.standard_normal((len(counts), case.num_heads, case.head_size)).astype(np.float32)
    return {
        "q": q.astype(dtype),
        "k_pages": pools[0].astype(dtype),
        "v_pages": pools[1].astype(dtype),
        "page_table": table,
        "lengths": np.asarray(case.lengths, np.int32),
    }
