"""Prompt lookup: proposes what followed when the request's own text last looked like its end does now.

The index is incremental: a committed token costs amortised O(1), a proposal O(limit), whatever the length of the text.
How matches are found and weighed is told in `ngram_reference`; where kernels can be built, compiled code does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.drafters import ngram_reference
from specdec.drafters.base import Drafter, DraftRow
from specdec.errors import ConfigError
from specdec.kernels import ngram as kernel
from specdec.tree import DraftTree

LONGEST = 32
MAX_LIMIT = 256


def check_options(min: int = 1, max: int = 16, limit: int = 15) -> None:
    """Raises ConfigError unless 1 <= min <= max <= 32 and 1 <= limit <= 256."""
    if not 1 <= min <= max <= LONGEST:
        raise ConfigError(f"drafter 'ngram': min and max must satisfy 1 <= min <= max <= {LONGEST}, got min={min}, max={max}")
    if not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"drafter 'ngram': limit must be between 1 and {MAX_LIMIT}, got {limit}")


class NgramDrafter(Drafter):
    """Drafts from the request's own tokens.

    Args:
        min: the shortest match that is worth a draft, in tokens.
        max: matches longer than this count as equally good.
        limit: nodes per step where nobody asks for less.
    """

    def __init__(self, min: int = 1, max: int = 16, limit: int = 15) -> None:
        check_options(min, max, limit)
        self.default_limit = limit
        self._shortest, self._longest = min, max
        self._lookup: Any = kernel if kernel.is_available() else ngram_reference  # two modules that offer the same
        self._indexes: dict[str, Any] = {}  # its `Index`

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        indexes = [self._index(row) for row in rows]
        depths = [min(row.limit, row.depth, MAX_LIMIT) for row in rows]
        trees: list[DraftTree] = self._lookup.grow_trees(indexes, [row.tokens for row in rows], [row.limit for row in rows], depths)
        return trees

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _index(self, row: DraftRow) -> Any:  # as above
        index = self._indexes.get(row.request_id)
        if index is None or index.length > len(row.tokens):
            index = self._indexes[row.request_id] = self._lookup.Index(self._shortest, self._longest)
        return index
