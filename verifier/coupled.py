"""The default rule: choose with noise that belongs to the position, and walk to the child that was chosen.

Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding" (2024,
arXiv 2408.07978). The choice at a node depends on its real prefix and on noise keyed by (seed, position, token) alone,
so the emitted ids are those of a run without drafts, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specdec.backend.base import Backend, TreeBatch
from specdec.request import Request
from specdec.verifier.base import Decision, RowNodes
from specdec.verifier.sampling import choice_batch


class CoupledRule:
    """Implements `specdec.verifier.base.Rule`."""

    blind = False
    reads_q = False
    bad_q = 0

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._requests: list[Request] = []
        self._choice = choice_batch([], [])  # how those choose, but for the positions

    def decide(self, rows: Sequence[RowNodes], logits: Tensor) -> list[Decision]:
        walked = self._backend.walk(logits, self._tree_batch(rows))
        paths, counts, tokens = walked.nodes.tolist(), walked.counts.tolist(), walked.next_tokens.tolist()
        return [Decision(tuple(path[:count]), token) for path, count, token in zip(paths, counts, tokens, strict=True)]

    def _tree_batch(self, rows: Sequence[RowNodes]) -> TreeBatch:
        positions = [row.length for row in rows]
        requests = [row.request for row in rows]
        if requests != self._requests:  # parameters never change, and from step to step the requests seldom do
            self._requests, self._choice = requests, choice_batch(requests, positions)
        return TreeBatch(
            tokens=np.concatenate([row.tree.tokens for row in rows]),
            parents=np.concatenate([row.tree.parents for row in rows]),
            offsets=np.array([0, *accumulate(len(row.tree) for row in rows)], dtype=np.int64),
            starts=np.array([row.start for row in rows], dtype=np.int64),
            choice=replace(self._choice, positions=torch.from_numpy(np.array(positions, dtype=np.int64))),
        )
