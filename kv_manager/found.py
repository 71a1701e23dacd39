"""Where a request that is about to be admitted finds its KV. Arithmetic only; nothing is taken here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from specdec.kv_manager.swap import SwappedTable


@dataclass(frozen=True)
class Found:
    """Pages that hold a request's leading tokens already, and how many of them each storage has.

    Attributes:
        pages: of the pool, to be shared.
        cached: leading tokens whose target KV is there.
        draft_cached: the same for the drafters' storages, by name.
        publishes: as in BlockTable.
        swapped: how many pages after those are to be fetched from the host.
    """

    pages: list[int]
    cached: int
    draft_cached: dict[str, int]
    publishes: bool
    swapped: int = 0


def with_swapped(found: Found, kept: SwappedTable, page_size: int, drafters: Collection[str]) -> Found:
    """Goes on behind the full pages that were found with what is kept on the host, if that reaches further.

    Args:
        drafters: names of their storages.
    """
    first = found.cached // page_size
    end = kept.end_of_run(first)
    slots = end * page_size
    if min(kept.cached, slots) <= found.cached:
        return found
    draft_cached = {}
    for name in drafters:
        count = min(found.draft_cached.get(name, 0), first * page_size)
        goes_on = count == first * page_size  # the pages before must be complete, or the drafter has a gap
        draft_cached[name] = max(count, min(kept.draft_cached.get(name, 0), slots)) if goes_on else count
    return Found(found.pages[:first], min(kept.cached, slots), draft_cached, found.publishes and kept.publishes, end - first)
