"""The page allocator of one replica's KV pool: plain Python, page ids only, no arrays of keys or values.

A page holds the keys and values of ``page_size`` consecutive tokens of one sequence, in every layer. Samples of
one prompt hold the same full pages, so each page counts its holders and is free when the last one lets go.
"""

from __future__ import annotations

from collections.abc import Iterable


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that ``num_tokens`` cached tokens occupy. Token t lies in page ``t // page_size``."""
    return -(-num_tokens // page_size)


class PageAllocator:
    """Hands out page ids ``0 … num_pages - 1`` and counts their holders.

    Raises:
      ValueError: from :meth:`share` and :meth:`release`, for a page that nobody holds: a bookkeeping error
        that would otherwise let two sequences write the same page.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is used first
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold ``page``; 0 is free."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages with one holder each, or None (and nothing taken) when so many aren't free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> list[int]:
        """One more holder for each page; returns them as the new holder's list."""
        pages = list(pages)
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is free and can't be shared")
            self._holders[page] += 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer for each page; a page without holders is free again."""
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} was released more often than it was held")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
