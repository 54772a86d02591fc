"""The page allocator: arithmetic at the borders and no leak under random traffic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.decoding.pages import PageAllocator, pages_for


def test_page_arithmetic():
    """K01. Seen to catch: length // page_size."""
    lengths = [1, 15, 16, 17, 31, 32, 33]
    assert [pages_for(length, 16) for length in lengths] == [1, 1, 1, 2, 2, 2, 3]
    assert [divmod(length, 16) for length in lengths] == [(0, 1), (0, 15), (1, 0), (1, 1), (1, 15), (2, 0), (2, 1)]
    needs_new = [pages_for(length + 1, 16) - pages_for(length, 16) for length in lengths]
    assert needs_new == [0, 0, 1, 0, 0, 1, 0]
    assert pages_for(0, 16) == 0


def test_allocate_takes_all_or_nothing():
    """Seen to catch: handing out what is there before finding that it is not enough."""
    allocator = PageAllocator(3)
    assert len(set(allocator.allocate(2))) == 2
    assert allocator.allocate(2) is None
    assert allocator.num_free == 1


def test_misuse_raises():
    """Seen to catch: counting below zero, which hands a page to two sequences."""
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(ValueError, match="released more often"):
        allocator.release(pages)
    with pytest.raises(ValueError, match="is free"):
        allocator.share(pages)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=300))
def test_random_traffic_never_leaks(num_pages, operations):
    """Against a model that holds lists of pages. Seen to catch: `share` that does not count, a release that
    frees at one holder."""
    allocator = PageAllocator(num_pages)
    held: list[list[int]] = []
    for operation, number in operations:
        if operation == 0:
            pages = allocator.allocate(number)
            assert (pages is None) == (number > num_pages - len({page for pages in held for page in pages}))
            if pages is not None:
                assert not set(pages) & {page for pages in held for page in pages}
                held.append(pages)
        elif held and operation == 1:
            held.append(allocator.share(held[number % len(held)]))
        elif held:
            allocator.release(held.pop(number % len(held)))
        counts = [sum(page in pages for pages in held) for page in range(num_pages)]
        assert [allocator.holders(page) for page in range(num_pages)] == counts
        assert allocator.num_free == counts.count(0)
    for pages in held:
        allocator.release(pages)
    assert allocator.num_free == num_pages
