"""The pages of the pool: how often each is referenced, and which may be taken next. It does not know what is in them.

A page is in exactly one state:

                 take()                       release(keep=False)
    free ────────────────────▶ referenced ────────────────────────▶ free
                                 ▲     │      release(keep=True)
                        share()  │     ▼
                               evictable ─── take(), oldest first, when nothing is free ──▶ referenced
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from specdec.errors import InvariantError


class BlockPool:
    """Reference counts, the free list, and the evictable pages from the least to the most recently released.

    Args:
        num_pages: pages in the pool, at least 1.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that `take` can still give: free or evictable."""
        return len(self._free) + len(self._evictable)

    def references(self, page: int) -> int:
        """How many tables hold `page`."""
        return self._references[page]

    def free_pages(self) -> Iterator[int]:
        return iter(self._free)

    def evictable_pages(self) -> Iterator[int]:
        """Evictable pages, the next one to be evicted first."""
        return iter(self._evictable)

    def take(self) -> tuple[int, bool]:
        """A page with one reference, and whether it was evicted to get it.

        Raises:
            InvariantError: no page is free or evictable.
        """
        if self._free:
            page, evicted = self._free.pop(), False
        elif self._evictable:
            page, evicted = self._evictable.popitem(last=False)[0], True
        else:
            raise InvariantError(
                f"all {self.num_pages} pages of the KV pool are referenced, and one more is wanted: "
                f"a plan must count its pages with pages_needed() against num_available"
            )
        self._references[page] = 1
        return page, evicted

    def share(self, page: int) -> None:
        """Adds a reference to a referenced or evictable page."""
        if self._references[page] == 0:
            if page not in self._evictable:
                raise InvariantError(f"page {page} is free, so it has nothing to share")
            del self._evictable[page]
        self._references[page] += 1

    def release(self, page: int, *, keep: bool) -> None:
        """Drops a reference; at the last one the page becomes evictable where `keep`, else free."""
        if self._references[page] == 0:
            raise InvariantError(f"page {page} is released more often than it was taken")
        self._references[page] -= 1
        if self._references[page] == 0:
            if keep:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def discard(self, page: int) -> None:
        """Frees `page` if it is evictable; a referenced page stays with its holders."""
        if page in self._evictable:
            del self._evictable[page]
            self._free.append(page)
