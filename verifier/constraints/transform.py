"""Masks the logits of a step with the constraints of its requests, and holds their states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.request import Constraint, Request
from specdec.verifier.base import RowNodes, StepLogits
from specdec.verifier.constraints.compiler import GrammarCompiler
from specdec.verifier.constraints.state import ConstraintState, Masks


class Constraints:
    """The constraints of all requests of an engine. Implements `specdec.verifier.base.Transform`.

    `compile` may be called from any thread, all else from the engine's.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._states: dict[str, ConstraintState] = {}

    def prepare(self) -> None:
        """Builds what all constraints need, so that the first of them does not wait. Raises RequestError where there can be none."""
        self._compiler.vocabulary()

    def compile(self, constraint: Constraint) -> None:
        """Compiles into the cache, for `add` to find. Raises RequestError for a constraint that cannot be had."""
        self._compiler.compile(constraint)

    def add(self, request: Request) -> None:
        """Takes a request in, if it is constrained. Raises as `compile`."""
        constraint = request.params.constraint
        if constraint is not None:
            self._states[request.id] = ConstraintState(*self._compiler.compile(constraint), request)

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def push(self, request_id: str, token: int) -> bool:
        """Tells of a committed token; whether the request's output is complete by it, and the request so ends."""
        state = self._states.get(request_id)
        return state is not None and state.push(token)

    def forced(self, request_id: str, limit: int) -> list[int]:
        """The tokens that a request's constraint leaves no choice about, at most `limit`."""
        state = self._states.get(request_id)
        return [] if state is None else state.forced(limit)

    def apply(self, rows: Sequence[RowNodes], logits: StepLogits) -> None:
        if not self._states:
            return
        for row in rows:
            state = self._states.get(row.request.id)
            if state is None:
                continue
            found = state.masks(row.tree)
            if found.words is not None:
                _mask(logits.edit()[row.start : row.start + row.count], found.words)
            for node, reason in found.failures:
                logits.fail(row, node, reason)


def _mask(logits: Tensor, words: Masks) -> None:
    """Bans the ids whose bits are not set.

    Args:
        logits: float32 [rows, vocabulary], changed in place.
        words: one mask per row.
    """
    banned = np.unpackbits((~words).view(np.uint8), axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    if logits.is_cpu:  # a third of the time of masked_fill_, and no threads to wait for
        np.copyto(logits.numpy(), -np.inf, where=banned)
    else:
        logits.masked_fill_(torch.from_numpy(banned).to(logits.device), -torch.inf)
