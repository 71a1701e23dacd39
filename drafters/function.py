"""Adapts a plain function `(tokens, limit) -> list[int]` to the drafter seam."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from specdec.drafters.base import Drafter, DraftRow
from specdec.tree import EMPTY, DraftTree

DraftFunction = Callable[[Sequence[int], int], Iterable[int] | None]


class FunctionDrafter(Drafter):
    """Proposes the chain that a function returns; it is called once per row.

    Args:
        function: given the committed tokens (read only) and the most tokens wanted, returns the likely next ids. Fewer,
            none or None are fine; more are cut.
    """

    def __init__(self, function: DraftFunction) -> None:
        self.function = function

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> DraftTree:
        limit = min(row.limit, row.depth)
        ids = self.function(row.tokens, limit)
        return EMPTY if ids is None else DraftTree.chain([_as_id(token) for token in islice(ids, limit)])


def _as_id(token: object) -> int:
    """An int from whatever integer type a function hands out; a float would silently become another token."""
    if isinstance(token, (bool, float)) or not hasattr(token, "__index__"):
        raise TypeError(f"a draft function must return token ids (int), got {token!r}")
    return int(token.__index__())
