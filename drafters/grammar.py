"""The `grammar` drafter: where a constraint leaves one way on, that way is the draft, and it is never rejected.

It proposes what the request's constraint forces, such as the braces, keys and constants of a JSON schema, and nothing
for requests without one. `grammar+ngram` adds guesses for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafters.base import Drafter, DrafterContext, DraftRow
from specdec.errors import ConfigError
from specdec.tree import EMPTY, DraftTree

MAX_LIMIT = 256
DEFAULT_LIMIT = 16


def check_options(limit: int = DEFAULT_LIMIT) -> None:
    """Raises ConfigError for option values that cannot be."""
    if not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"drafter grammar: limit must be between 1 and {MAX_LIMIT}, got {limit}")


class GrammarDrafter(Drafter):
    """Proposes forced tokens.

    Args:
        context: knows what is forced.
        limit: nodes per step.
    """

    def __init__(self, context: DrafterContext, limit: int = DEFAULT_LIMIT) -> None:
        check_options(limit)
        self.default_limit = limit
        self._forced = context.forced

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        return [self._tree(row) for row in rows]

    def _tree(self, row: DraftRow) -> DraftTree:
        if row.params.constraint is None or self._forced is None:
            return EMPTY
        tokens = self._forced(row.request_id, min(row.limit, row.depth))
        return DraftTree.chain(tokens) if tokens else EMPTY
