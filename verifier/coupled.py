"""The default rule: choose at every node with noise that belongs to the position, then walk.

Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding" (2024,
arXiv 2408.07978). The choice at a node depends on its real prefix and on noise keyed by (seed, position, token) alone,
so the emitted ids are those of a run without drafts, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.backend.base import Backend
from specdec.verifier.base import Decision, RowNodes
from specdec.verifier.sampling import choice_batch
from specdec.verifier.walk import walk


class CoupledRule:
    """Implements `specdec.verifier.base.Rule`."""

    blind = False
    reads_q = False
    bad_q = 0

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def decide(self, rows: Sequence[RowNodes], logits: Tensor) -> list[Decision]:
        positions = [position for row in rows for position in row.positions()]
        batch = choice_batch([row.request for row in rows], positions, [row.count for row in rows])
        chosen: list[int] = self._backend.choose(_rows_of(logits, rows), batch).tolist()
        decisions = []
        start = 0
        for row in rows:
            path, token = walk(row.tree, chosen[start : start + row.count])
            start += row.count
            decisions.append(Decision(tuple(path), token))
        return decisions


def _rows_of(logits: Tensor, rows: Sequence[RowNodes]) -> Tensor:
    """The logit rows of `rows`; the tensor itself where they are all of it, which is the common case."""
    if sum(row.count for row in rows) == len(logits):
        return logits
    return logits[torch.cat([torch.arange(row.start, row.start + row.count) for row in rows])]
