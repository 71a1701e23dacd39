"""KV of preempted requests, kept in host memory until they run again. Books only; storages copy. It decides nothing.

table of a victim   | p7  p2  p9  p4 |          p2 is held by another request too: it is not copied,
places on the host  | 3   -   0   1  |          and has to be found again when the victim returns
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.errors import InvariantError

_MEASURED_PAGES = 8


class SwapStorage(Protocol):
    """A KV storage that has as many places on the host as the books say."""

    def copy_out(self, pages: Sequence[int], places: Sequence[int]) -> None:
        """Copies pages of the pool to places on the host, pages[i] to places[i]; returns when they are there."""
        ...

    def copy_in(self, places: Sequence[int], pages: Sequence[int]) -> None:
        """Copies places on the host to pages of the pool, places[i] to pages[i]."""
        ...


@dataclass(frozen=True)
class SwapOffer:
    """What swapping a request out and back would come to.

    Attributes:
        tokens: whose KV would be kept.
        seconds: predicted, for both ways together.
    """

    tokens: int
    seconds: float


@dataclass
class SwappedTable:
    """What a preempted request held.

    Attributes:
        places: index of a page in its table -> the place where it is kept; pages that others held are absent.
        cached: leading tokens whose target KV it had.
        draft_cached: the same for the drafters' storages.
        publishes: as in BlockTable.
    """

    places: dict[int, int]
    cached: int
    draft_cached: dict[str, int] = field(default_factory=dict)
    publishes: bool = True

    def end_of_run(self, first: int) -> int:
        """The index after the last page of those that are kept from `first` on without a gap."""
        end = first
        while end in self.places:
            end += 1
        return end


class SwapSpace:
    """The places, and who has them.

    Args:
        num_places: pages that each storage has room for on the host.
        storages: all that keep KV, by name; one that is registered later takes part from then on.
        clock: seconds, after all work queued so far is done.

    Attributes:
        pages_out, pages_in: pages copied so far, all storages of a page counted as one.
        seconds: that copying took.
    """

    def __init__(self, num_places: int, storages: Mapping[str, SwapStorage], clock: Callable[[], float]) -> None:
        self.num_places = num_places
        self.pages_out = 0
        self.pages_in = 0
        self.seconds = 0.0
        self._storages = storages
        self._clock = clock
        self._free = list(range(num_places - 1, -1, -1))
        self._tables: dict[str, SwappedTable] = {}
        self._page_s = 0.0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def page_s(self) -> float:
        """Seconds per page and way: of all copies so far, or as measured at the start."""
        copied = self.pages_out + self.pages_in
        return self.seconds / copied if copied else self._page_s

    def status(self) -> dict[str, float]:
        """Counters, as JSON values."""
        counts = {"places": self.num_places, "free": self.num_free, "pages_out": self.pages_out, "pages_in": self.pages_in}
        return {**counts, "seconds": self.seconds}

    def measure(self, num_pages: int) -> None:
        """Times copies of pages that nobody uses yet; their content does not change.

        Args:
            num_pages: pages in the pool.
        """
        some = list(range(min(_MEASURED_PAGES, num_pages, self.num_places)))
        for _ in range(2):  # the first touches memory that was not touched yet
            start = self._clock()
            for storage in self._storages.values():
                storage.copy_out(some, some)
                storage.copy_in(some, some)
            self._page_s = (self._clock() - start) / (2 * len(some))

    def table(self, request_id: str) -> SwappedTable | None:
        """What is kept of a request; None where nothing is."""
        return self._tables.get(request_id)

    def put(self, request_id: str, table: SwappedTable, pages: Mapping[int, int]) -> None:
        """Copies pages out and keeps the table.

        Args:
            table: its places are filled in here.
            pages: index in the table -> page of the pool; at most `num_free`.
        """
        if request_id in self._tables:
            raise InvariantError(f"request {request_id} is swapped out twice")
        if len(pages) > len(self._free):
            raise InvariantError(f"{len(pages)} places are wanted on the host, and {len(self._free)} are free")
        table.places = {index: self._free.pop() for index in pages}
        self._tables[request_id] = table
        places = list(table.places.values())
        start = self._clock()
        for storage in self._storages.values():
            storage.copy_out(list(pages.values()), places)
        self.seconds += self._clock() - start
        self.pages_out += len(places)

    def fetch(self, request_id: str, first: int, pages: Sequence[int]) -> None:
        """Copies the kept pages from index `first` on into `pages` of the pool."""
        table = self._tables[request_id]
        places = [table.places[index] for index in range(first, first + len(pages))]
        start = self._clock()
        for storage in self._storages.values():
            storage.copy_in(places, pages)
        self.seconds += self._clock() - start
        self.pages_in += len(places)

    def drop(self, request_id: str) -> None:
        """Frees what is kept of a request; nothing happens where nothing is."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._free.extend(table.places.values())

    def stop_publishing(self) -> None:
        """The prefix cache was reset: what was computed before is not to be published after."""
        for table in self._tables.values():
            table.publishes = False

    def check(self, admitted: Collection[str]) -> None:
        """Raises InvariantError unless every place is free or held by one request, none of which is in `admitted`."""
        held = [place for table in self._tables.values() for place in table.places.values()]
        if sorted([*held, *self._free]) != list(range(self.num_places)):
            raise InvariantError(f"places on the host that are not exactly one of free and held: {sorted(held)} and {sorted(self._free)}")
        if both := sorted(set(self._tables) & set(admitted)):
            raise InvariantError(f"requests that run and are swapped out: {both}")
