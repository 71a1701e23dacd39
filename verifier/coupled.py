"""The default rule: choose at every node with noise that belongs to the position, then walk.

Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding" (2024,
arXiv 2408.07978). The choice at a node depends on its real prefix and on noise keyed by (seed, position, token) alone,
so the emitted ids are those of a run without drafts, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.backend.base import Backend
from specdec.plan import Accepted, BatchPlan
from specdec.request import Request
from specdec.tree import DraftTree
from specdec.verifier.sampling import choice_batch
from specdec.verifier.walk import walk


class CoupledVerifier:
    """Implements `specdec.verifier.base.Verifier`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def accept(self, plan: BatchPlan, trees: Sequence[DraftTree], logits: Tensor) -> Accepted:
        emitting = [(index, row.request, trees[index]) for index, row in enumerate(plan.rows) if row.emits]
        next_tokens = np.full(len(plan.rows), -1, dtype=np.int32)
        counts = np.zeros(len(plan.rows), dtype=np.int32)
        paths: dict[int, list[int]] = {}
        errors: dict[int, str] = {}
        if emitting:
            chosen = self._choose(emitting, logits)
            start = 0
            for index, _, tree in emitting:
                path, token = walk(tree, chosen[start : start + len(tree) + 1])
                start += len(tree) + 1
                paths[index] = path
                counts[index] = len(path)
                next_tokens[index] = token
                if token < 0:
                    errors[index] = "the model's logits hold NaN or no finite value, so no token can be chosen"
        nodes = np.full((len(plan.rows), max(counts, default=0)), -1, dtype=np.int32)
        for index, path in paths.items():
            nodes[index, : len(path)] = path
        return Accepted(nodes, counts, next_tokens, errors)

    def _choose(self, emitting: Sequence[tuple[int, Request, DraftTree]], logits: Tensor) -> list[int]:
        """R tokens: for each emitting row the choice at its root, then at its nodes."""
        positions: list[int] = []
        for _, request, tree in emitting:
            length = len(request.tokens)
            positions.append(length)
            positions.extend((length + tree.depths()).tolist())
        repeats = [len(tree) + 1 for _, _, tree in emitting]
        batch = choice_batch([request for _, request, _ in emitting], positions, repeats)
        chosen: list[int] = self._backend.choose(logits, batch).tolist()
        return chosen
