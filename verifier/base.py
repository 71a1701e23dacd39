"""The verifier seam: what a verification rule is given, and what it decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.request import Request
from specdec.tree import DraftTree


@dataclass(frozen=True)
class RowNodes:
    """One emitting row: its request, its draft, and where its logits lie.

        logits[start]            the target after the last committed token, the root
        logits[start + 1 + i]    the target after node i

    Attributes:
        index: of the row in the plan.
        start: first of its `len(tree) + 1` logit rows.
        length: committed tokens; the token chosen at the root stands at this position, that at node i at
            `length + depth(i)`.
    """

    index: int
    request: Request
    tree: DraftTree
    start: int
    length: int

    @property
    def count(self) -> int:
        """Logit rows."""
        return len(self.tree) + 1

    def positions(self) -> list[int]:
        """For each logit row the index in the sequence of the token that is chosen there."""
        return [self.length, *(self.length + self.tree.depths()).tolist()]

    def history(self, node: int) -> list[int]:
        """The draft tokens between the root and node `node`, itself included; none for the root, -1."""
        tokens: list[int] = self.tree.tokens[self.tree.path(node)].tolist()
        return tokens


@dataclass(frozen=True)
class Decision:
    """What a rule decided for one row.

    Attributes:
        path: accepted nodes, from the root down.
        token: the correction or bonus after them; -1 where no token can be chosen.
    """

    path: tuple[int, ...]
    token: int


class StepLogits:
    """The logits of a step: as the model gave them, then as the transforms leave them, in the same memory.

    Args:
        logits: float32 [R, vocabulary]; belongs to the step from now on.
        keep: logit rows whose raw values are asked for later; they are copied before the first edit, the others never.

    Attributes:
        errors: plan row -> why its next token cannot be chosen; see `fail`.
    """

    def __init__(self, logits: Tensor, keep: Sequence[int] = ()) -> None:
        self._logits = logits
        self._keep = keep
        self._kept: dict[int, Tensor] | None = None
        self.errors: dict[int, str] = {}

    @property
    def current(self) -> Tensor:
        """float32 [R, vocabulary], read only."""
        return self._logits

    def edit(self) -> Tensor:
        """float32 [R, vocabulary], to be changed in place."""
        if self._kept is None:
            self._kept = dict(zip(self._keep, self._logits[list(self._keep)], strict=True)) if self._keep else {}
        return self._logits

    def raw(self, rows: Sequence[int]) -> Tensor:
        """float32 [len(rows), vocabulary] as the model gave them; rows outside `keep` only where no transform edits."""
        kept = self._kept or {}
        return torch.stack([kept.get(row, self._logits[row]) for row in rows])

    def fail(self, row: RowNodes, node: int, reason: str) -> None:
        """No token can be chosen after node `node` of a row (-1: the root), for a reason that is the request's own.

        The request fails when that node is the root, as it would without drafts; at a draft node nothing more is
        chosen, and the step ends before it.
        """
        self.edit()[row.start + 1 + node] = torch.nan
        if node < 0:
            self.errors[row.index] = reason


class Transform(Protocol):
    """Changes logits before a rule sees them, at every node with the history of the node's own path."""

    def apply(self, rows: Sequence[RowNodes], logits: StepLogits) -> None:
        """Edits the logits of those of `rows` that ask for it; touches nothing, and costs nothing, where none does."""
        ...


class Rule(Protocol):
    """A verification rule: decides for rows whose logits have gone through every transform.

    Attributes:
        blind: the number of nodes verified may not depend on the sampled tokens themselves (the
            non-anticipation rule, docs/architecture.md). Whoever budgets then sees only the shape of a draft.
        reads_q: the rule reads `DraftTree.q`; drafters that sample must then draw from the draft noise stream and say q.
        bad_q: proposals met so far that were no distribution; each counted as its token for certain, which is exact too.
    """

    blind: bool
    reads_q: bool
    bad_q: int

    def decide(self, rows: Sequence[RowNodes], logits: Tensor) -> list[Decision]:
        """
        Args:
            rows: emitting rows that use this rule.
            logits: float32 [R, vocabulary] of all rows of the step, transformed and masked, before temperature and
                filters. Read only.

        Returns:
            One decision per row, in order.
        """
        ...
