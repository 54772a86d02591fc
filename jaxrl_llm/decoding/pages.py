"""The page allocator of one replica's KV pool: plain Python, page ids only, no arrays of keys or values.

A page holds the keys and values of ``page_size`` consecutive tokens of one sequence, in every layer. Sequences that
begin alike hold the same full pages, so each page counts its holders and is free when the last one lets go.

A full page can be named by what it caches: the key of a page follows from its tokens and the key of the page before it,
so it stands for everything up to its end. A free page keeps its name until it is handed out again, and is found by it
meanwhile: the next turn of a conversation, or a prompt that begins as another did, finds what was computed.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that ``num_tokens`` cached tokens occupy. Token t lies in page ``t // page_size``."""
    return -(-num_tokens // page_size)


def page_keys(tokens: np.ndarray, page_size: int) -> list[bytes]:
    """The key of each full page of a sequence: a hash of all its tokens up to the page's end."""
    data, keys, key = np.ascontiguousarray(tokens, np.int32), [], b""
    for end in range(page_size, len(data) + 1, page_size):
        key = hashlib.blake2b(key + data[end - page_size : end].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class PageAllocator:
    """Hands out page ids ``0 … num_pages - 1`` and counts their holders.

    Raises:
      ValueError: from :meth:`share`, :meth:`release` and :meth:`name`, for a page that nobody holds: a bookkeeping
        error that would otherwise let two sequences write the same page.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        # Handed out from the front: pages without a name, the one freed last first, then named ones, the oldest first.
        self._free = collections.OrderedDict.fromkeys(range(num_pages))
        self._holders = [0] * num_pages
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

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
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            self._forget(page)
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
                self._free[page] = None
                if page not in self._keys:
                    self._free.move_to_end(page, last=False)

    def name(self, page: int, key: bytes) -> None:
        """Says what a held page caches from now on. Of two pages with the same content one is named."""
        if self._holders[page] < 1:
            raise ValueError(f"page {page} is free: nobody vouches for its content")
        if key not in self._pages:
            self._forget(page)
            self._pages[key], self._keys[page] = page, key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of ``keys`` from the first that all are cached, with one more holder each."""
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            self._free.pop(page, None)
            self._holders[page] += 1
            found.append(page)
        return found

    def forget(self) -> None:
        """Drops every name: nothing that was cached is valid any more."""
        self._keys.clear()
        self._pages.clear()

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._pages[key]
