"""Whether the books of pool, tables and prefix cache balance. Reads everything, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from specdec.errors import InvariantError
from specdec.kv_manager.block_pool import BlockPool
from specdec.kv_manager.block_table import TARGET, BlockTable
from specdec.kv_manager.prefix_cache import PrefixCache


def check_books(pool: BlockPool, cache: PrefixCache, tables: Collection[BlockTable], page_size: int) -> None:
    """Raises InvariantError unless every page, table and cache entry agrees with the others."""
    held: Counter[int] = Counter()
    for table in tables:
        _check_table(table, cache, page_size)
        held.update(table.pages.view().tolist())
    _check_pages(pool, cache, held)
    _check_cache(cache)


def _check_table(table: BlockTable, cache: PrefixCache, page_size: int) -> None:
    name, pages, tokens = table.request.id, table.pages.view().tolist(), table.request.tokens
    if len(set(pages)) != len(pages):
        raise InvariantError(f"request {name} holds a page twice: {pages}")
    slots = len(pages) * page_size
    for storage, cached in {TARGET: table.cached, **table.draft_cached}.items():
        # The target forwards the last token to choose the next one, so that one's KV is never there between steps.
        most = len(tokens) - 1 if storage == TARGET else len(tokens)
        if not 0 <= cached <= min(slots, most):
            raise InvariantError(f"request {name}: {storage} counts {cached} cached tokens, at most {most} in {slots} slots are possible")
    full = table.cached // page_size
    digests = table.chain.first(tokens, full)
    for index in range(full):
        published = cache.digest(pages[index])
        if published is not None and published != digests[index]:
            raise InvariantError(f"request {name} holds page {pages[index]} at index {index}, which is published with other content")


def _check_pages(pool: BlockPool, cache: PrefixCache, held: Counter[int]) -> None:
    free, evictable = list(pool.free_pages()), set(pool.evictable_pages())
    if len(free) != len(set(free)):
        raise InvariantError(f"the free list holds a page twice: {sorted(free)}")
    for page in range(pool.num_pages):
        if pool.references(page) != held[page]:
            raise InvariantError(f"page {page} counts {pool.references(page)} references, and {held[page]} tables hold it")
    states = Counter(free)
    states.update(evictable)
    states.update(set(held))
    if set(states) != set(range(pool.num_pages)) or any(count != 1 for count in states.values()):
        wrong = sorted(set(range(pool.num_pages)) ^ {page for page, count in states.items() if count == 1})
        raise InvariantError(f"pages that are not exactly one of free, evictable and referenced: {wrong}")
    if unknown := sorted(page for page in evictable if page not in cache):
        raise InvariantError(f"evictable pages that the prefix cache does not know: {unknown}")
    if lost := sorted(page for page in free if page in cache):
        raise InvariantError(f"free pages that the prefix cache still names: {lost}")


def _check_cache(cache: PrefixCache) -> None:
    for digest, page in cache.entries():
        if cache.digest(page) != digest:
            raise InvariantError(f"the prefix cache finds page {page} by a digest that is not the page's own")
    if len({page for _, page in cache.entries()}) != len(cache):
        raise InvariantError("the prefix cache names a page by two digests")
    for storage, pages in cache.complete_pages():
        if unknown := sorted(page for page in pages if page not in cache):
            raise InvariantError(f"pages complete in {storage} but not published: {unknown}")
