"""KVManager: the pages of every request, shared where contents agree, across one step of reserve, forward, commit.

The target and every drafter with KV store under the same block tables; each counts its own cached tokens. What the
tensors look like is `storage`'s business, who may run is the scheduler's.

    slot      0 ........ cached ........ cached + pending ........... + draft_limit
              |  has KV  |    pending    |  n0  n1  n2  n3  n4  n5    |
    reserve:             |<------ held and writable: no page shared ->|
    commit:                              |  n0  n2  n5 |  free the pages beyond len(tokens)
                                          accepted path, moved together in the target's storage
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from specdec.errors import ConfigError, DrafterError, InvariantError
from specdec.kv_manager.audit import check_books
from specdec.kv_manager.block_pool import BlockPool
from specdec.kv_manager.block_table import TARGET, BlockTable, PageList
from specdec.kv_manager.found import Found, with_swapped
from specdec.kv_manager.prefix_cache import DigestChain, PrefixCache
from specdec.kv_manager.swap import SwapOffer, SwappedTable, SwapSpace, SwapStorage
from specdec.plan import BatchPlan, Row, RowOutcome
from specdec.request import Request


class Storage(SwapStorage, Protocol):
    """KV contents of the pool's pages; `copy_out` and `copy_in` are called only where there is room on the host."""

    def copy_pages(self, src: list[int], dst: list[int]) -> None:
        """Copies whole pages, src[i] to dst[i]; every source is read before any destination is written."""
        ...

    def move_slots(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Copies single slots (page * page_size + offset), src[i] to dst[i]; int64 [m] each. Reads before it writes, too."""
        ...


@dataclass
class KVStats:
    """Counters since the manager was made.

    Attributes:
        queries: tokens of admitted requests.
        hits: those among them whose target KV stood in the pool already.
        evictions: published pages whose content was given up for another.
        copies: pages copied because they were shared.
    """

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    copies: int = 0


class KVManager:
    """The books of one KV pool.

    Args:
        num_pages: pages in the pool.
        page_size: tokens in a page.
        prefix_cache: keep full pages of committed tokens for requests that start alike.

    Raises:
        ConfigError: `num_pages` or `page_size` is less than 1.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.stats = KVStats()
        self._pool = BlockPool(num_pages)
        self._cache = PrefixCache()  # stays empty without `prefix_cache`, and everything follows from that
        self._prefix_cache = prefix_cache
        self._tables: dict[str, BlockTable] = {}
        self._storages: dict[str, Storage] = {}
        self.swap: SwapSpace | None = None
        # Weak, so that the digests outlive a preemption and end with their request.
        self._chains: WeakKeyDictionary[Request, DigestChain] = WeakKeyDictionary()

    @property
    def num_free(self) -> int:
        """Pages on the free list."""
        return self._pool.num_free

    @property
    def num_available(self) -> int:
        """Pages that a reservation can take: free or evictable."""
        return self._pool.num_available

    def register(self, name: str, storage: Storage) -> None:
        """Adds a storage under the tables; "target" is the one that `commit` compacts."""
        if name in self._storages:
            raise InvariantError(f"a KV storage named {name!r} is registered already; known: {', '.join(self._storages)}")
        self._storages[name] = storage

    def enable_swap(self, num_places: int, clock: Callable[[], float]) -> None:
        """Lets preempted requests keep their KV on the host; every storage must have room for so many pages there."""
        self.swap = SwapSpace(num_places, self._storages, clock)
        self.swap.measure(self.num_pages)

    # Requests

    def admit(self, request: Request) -> int:
        """Gives `request` a table with all pages that already hold its leading tokens. At least one token is left to forward.

        Takes pages from the free list only for a request that was swapped out, whose `pages_needed` must be available.

        Returns:
            Tokens whose target KV is there.
        """
        if request.id in self._tables:
            raise InvariantError(f"request {request.id} is admitted twice: release it first")
        found = self._find(request)
        for page in found.pages:
            self._pool.share(page)
        fetched = [self._take() for _ in range(found.swapped)]
        if self.swap is not None:
            if fetched:
                self.swap.fetch(request.id, len(found.pages), fetched)
            self.swap.drop(request.id)
        hits = len(found.pages) * self.page_size if fetched else found.cached
        self._tables[request.id] = BlockTable(
            request,
            self._chain(request),
            PageList([*found.pages, *fetched]),
            found.cached,
            found.draft_cached,
            num_offered=hits // self.page_size,
            publishes=found.publishes,
        )
        self.stats.queries += len(request.tokens)
        self.stats.hits += hits
        return found.cached

    def release(self, request: Request) -> None:
        """Gives back all pages of a request that finished, is aborted or preempted; no table, nothing to do.

        Published pages stay for later requests; a later page of a sequence is evicted before an earlier one. What was
        swapped out is given up.
        """
        if self.swap is not None:
            self.swap.drop(request.id)
        if request.id in self._tables:
            self._release(self._tables[request.id])

    def swap_offer(self, request: Request) -> SwapOffer | None:
        """What `swap_out` would keep and cost; None where there is nothing to keep, or no room."""
        pages = self._swappable(self._table(request.id))
        if self.swap is None or not pages:
            return None
        tokens = min(len(pages) * self.page_size, self._table(request.id).cached)
        return SwapOffer(tokens, 2 * len(pages) * self.swap.page_s)

    def swap_out(self, request: Request) -> None:
        """Releases a preempted request and keeps its KV on the host, as far as there is room and no other request holds it.

        It comes back with `admit`, unless pages before it are gone by then; `release` gives it up.
        """
        table = self._table(request.id)
        pages = self._swappable(table)
        if self.swap is None or not pages:
            raise InvariantError(f"request {request.id} has nothing that can be swapped out: ask swap_offer first")
        self.swap.put(request.id, SwappedTable({}, table.cached, dict(table.draft_cached), table.publishes), pages)
        self._release(table)

    def _release(self, table: BlockTable) -> None:
        # Once more from the start: the same content may have been published in another page, and evicted since.
        table.num_offered = 0
        self._publish(table)
        del self._tables[table.request.id]
        for page in reversed(table.pages.truncate(0)):
            self._give_back(page)

    def holds(self, request_id: str) -> bool:
        """Whether the request has a table."""
        return request_id in self._tables

    def pages(self, request_id: str) -> NDArray[np.int32]:
        """int32 [p], the request's block table; a view, valid until the next `reserve`."""
        return self._table(request_id).pages.view()

    def cached(self, request_id: str, storage: str = TARGET) -> int:
        """Leading tokens whose KV is in `storage`."""
        table = self._table(request_id)
        return table.cached if storage == TARGET else table.draft_cached.get(storage, 0)

    def set_cached(self, request_id: str, storage: str, count: int) -> None:
        """A drafter states how many leading committed tokens now have KV in its storage.

        Raises:
            DrafterError: more than the committed tokens or the held slots, or not a drafter's storage.
        """
        table = self._table(request_id)
        if storage == TARGET or storage not in self._storages:
            drafters = ", ".join(name for name in self._storages if name != TARGET)
            raise DrafterError(f"cached tokens are set for a drafter's KV, got {storage!r}; registered are: {drafters or 'none'}")
        limit = min(len(table.request.tokens), len(table.pages) * self.page_size)
        if not 0 <= count <= limit:
            raise DrafterError(
                f"{storage} states {count} cached tokens of request {request_id}, allowed are 0 to {limit}: drafts are not committed"
            )
        before = table.draft_cached.get(storage, 0)
        table.draft_cached[storage] = count
        # Only pages below the target's count are known to hold this request's tokens; later ones are marked when published.
        low, high = min(before, count), min(max(before, count), table.cached)
        for index in range(low // self.page_size, high // self.page_size):
            self._cache.mark(storage, table.pages[index], complete=count > before)

    # One step

    def pages_needed(self, request: Request, num_tokens: int) -> int:
        """Pages that leave `num_available` until the first `num_tokens` slots are held, and writable from `cached` on.

        Counts copies of shared pages. For a request without a table it includes what `admit` would take.
        """
        wanted = self._pages_for(num_tokens)
        table = self._tables.get(request.id)
        if table is not None:
            first = table.cached // self.page_size
            copies = sum(self._is_shared(table.pages[index]) for index in range(first, min(wanted, len(table.pages))))
            return max(0, wanted - len(table.pages)) + copies
        found = self._find(request)
        copies = max(0, min(wanted, len(found.pages)) - found.cached // self.page_size)
        revived = sum(self._pool.references(page) == 0 for page in found.pages)
        return max(found.swapped, wanted - len(found.pages)) + copies + revived

    def reserve(self, plan: BatchPlan) -> None:
        """Makes the slots of every row's pending tokens and draft nodes held and writable.

        Raises:
            InvariantError: the plan needs more pages than are available, or does not fit the tables.
        """
        src: list[int] = []
        dst: list[int] = []
        for row in plan.rows:
            table = self._planned(row)
            wanted = self._pages_for(row.cached + row.pending + row.draft_limit)
            for index in range(table.cached // self.page_size, min(wanted, len(table.pages))):
                page = table.pages[index]
                if self._is_shared(page):
                    table.pages[index] = copy = self._take()
                    self._give_back(page)
                    src.append(page)
                    dst.append(copy)
            while len(table.pages) < wanted:
                table.pages.append(self._take())
        if src:
            self.stats.copies += len(src)
            for storage in self._storages.values():
                storage.copy_pages(src, dst)

    def commit(self, plan: BatchPlan, outcomes: Sequence[RowOutcome]) -> None:
        """Keeps the accepted KV of a forward; called after the emitted tokens were appended to the requests.

        Moves accepted paths together in the target's storage (drafters state what they kept with `set_cached`), frees
        the tail, publishes full pages. A row with finish reason `error` keeps nothing of the step, so that no other
        request can be given KV that is not finite.
        """
        if len(outcomes) != len(plan.rows):
            raise InvariantError(f"a plan of {len(plan.rows)} rows needs as many outcomes, got {len(outcomes)}")
        done = [
            (row, self._planned(row), outcome) for row, outcome in zip(plan.rows, outcomes, strict=True) if outcome.finish_reason != "error"
        ]
        self._compact(done)
        for row, table, outcome in done:
            num_tokens = len(row.request.tokens)
            table.cached = min(row.cached + row.pending + len(outcome.path), num_tokens - 1)
            for page in reversed(table.pages.truncate(self._pages_for(num_tokens))):
                self._give_back(page)
            self._publish(table)

    # Prefix cache

    def lookup(self, tokens: Sequence[int]) -> int:
        """Leading tokens that `admit` would find cached for a new request with these tokens; takes nothing."""
        return len(self._match(DigestChain(self.page_size), tokens)) * self.page_size

    @property
    def published(self) -> frozenset[bytes]:
        """Digests of all pages that can be found: what the prefix cache holds, wherever it lies."""
        return self._cache.digests()

    def reset_prefix_cache(self) -> None:
        """Forgets all published content. Running requests go on, and what they hold now is not published again."""
        for page in self._cache.clear():
            self._pool.discard(page)
        for table in self._tables.values():
            table.publishes = False
        if self.swap is not None:
            self.swap.stop_publishing()

    def check(self) -> None:
        """Raises InvariantError unless pages, tables, prefix cache and what is swapped out agree."""
        check_books(self._pool, self._cache, self._tables.values(), self.page_size)
        if self.swap is not None:
            self.swap.check(self._tables)

    # Helpers

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _table(self, request_id: str) -> BlockTable:
        table = self._tables.get(request_id)
        if table is None:
            raise InvariantError(f"request {request_id} has no block table: admit it first")
        return table

    def _planned(self, row: Row) -> BlockTable:
        table = self._table(row.request.id)
        if row.cached != table.cached or row.pending < 1 or row.cached + row.pending > len(row.request.tokens):
            raise InvariantError(
                f"request {row.request.id}: a row of {row.cached} cached + {row.pending} pending tokens does not fit "
                f"{table.cached} cached of {len(row.request.tokens)}"
            )
        return table

    def _chain(self, request: Request) -> DigestChain:
        chain = self._chains.get(request)
        if chain is None:
            chain = self._chains[request] = DigestChain(self.page_size)
        return chain

    def _is_shared(self, page: int) -> bool:
        return self._pool.references(page) > 1 or page in self._cache

    def _take(self) -> int:
        page, evicted = self._pool.take()
        if evicted:
            self.stats.evictions += 1
            self._cache.withdraw(page)
        return page

    def _give_back(self, page: int) -> None:
        self._pool.release(page, keep=page in self._cache)

    def _match(self, chain: DigestChain, tokens: Sequence[int]) -> list[int]:
        """Published pages that hold the leading tokens, short of the last token, which has to be forwarded."""
        if len(self._cache) == 0:
            return []
        count = (len(tokens) - 1) // self.page_size
        return self._cache.match(chain.first(tokens, count)[:count])

    def _swappable(self, table: BlockTable) -> dict[int, int]:
        """Index -> page of those that only this request holds, the first ones as far as there is room on the host."""
        room = self.swap.num_free if self.swap is not None else 0
        written = self._pages_for(max(table.cached, *table.draft_cached.values(), 0))
        own = [(index, page) for index, page in enumerate(table.pages.view()[:written].tolist()) if self._pool.references(page) == 1]
        return dict(own[:room])

    def _find(self, request: Request) -> Found:
        """Where a request without a table finds its KV: in pages that it can share, and after them what was swapped out."""
        found = self._find_shared(request)
        kept = self.swap.table(request.id) if self.swap is not None else None
        if kept is None:
            return found
        return with_swapped(found, kept, self.page_size, [name for name in self._storages if name != TARGET])

    def _find_shared(self, request: Request) -> Found:
        """What a request without a table can share: with its sibling, or out of the prefix cache.

        Nothing while it wants prompt tokens scored: their logits come with a forward of the tokens before them.
        """
        if request.params.prompt_logprobs is not None and request.num_scored < request.num_prompt:
            return Found([], 0, {}, publishes=True)
        pages = self._match(self._chain(request), request.tokens)
        cached = len(pages) * self.page_size
        prompt = request.num_prompt - 1
        sibling = self._tables.get(request.parent) if request.parent is not None else None
        if sibling is not None and sibling.cached >= prompt > cached:
            if sibling.request.tokens[:prompt] != request.tokens[:prompt]:
                raise InvariantError(f"request {request.id} names {request.parent} as its parent, but their prompts differ")
            # The last of these pages may be written by both; whoever reserves it first gets a copy.
            shared: list[int] = sibling.pages.view()[: self._pages_for(prompt)].tolist()
            draft_cached = {name: min(count, prompt) for name, count in sibling.draft_cached.items()}
            return Found(shared, prompt, draft_cached, sibling.publishes)
        draft_cached = {name: self._cache.leading_complete(name, pages) * self.page_size for name in self._storages if name != TARGET}
        return Found(pages, cached, draft_cached, publishes=True)

    def _compact(self, done: Sequence[tuple[Row, BlockTable, RowOutcome]]) -> None:
        """Moves the accepted nodes' slots to follow the pending tokens, in one call; chains never move."""
        src: list[int] = []
        dst: list[int] = []
        for row, table, outcome in done:
            path = outcome.path
            chain = tuple(range(len(path)))
            if path and (path[0] < 0 or path[-1] >= row.draft_limit or (path != chain and list(path) != sorted(set(path)))):
                raise InvariantError(f"request {row.request.id}: an accepted path must ascend within {row.draft_limit} nodes, got {path}")
            if path == chain:
                continue
            first = row.cached + row.pending
            moved = [(node, place) for place, node in zip(chain, path, strict=True) if node != place]
            src += table.slots([first + node for node, _ in moved], self.page_size)
            dst += table.slots([first + place for _, place in moved], self.page_size)
        if src and TARGET in self._storages:
            self._storages[TARGET].move_slots(np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64))

    def _publish(self, table: BlockTable) -> None:
        """Offers the full pages below `cached` that were not offered yet to the prefix cache."""
        full = table.cached // self.page_size
        if not self._prefix_cache or not table.publishes or full <= table.num_offered:
            return
        digests = table.chain.first(table.request.tokens, full)
        for index in range(table.num_offered, full):
            page = table.pages[index]
            if self._cache.publish(digests[index], page):
                for name, count in table.draft_cached.items():
                    if count >= (index + 1) * self.page_size:
                        self._cache.mark(name, page, complete=True)
        table.num_offered = full
