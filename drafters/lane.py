"""One live drafter with its guard and its books. Whatever the drafter does ends here: it costs its own drafts, counted.

A user's drafter runs in a worker thread and is given up after a time-out; a built-in one runs in place.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specdec.drafters.base import Drafter, DraftOutcome, DraftRow
from specdec.drafters.function import FunctionDrafter
from specdec.drafters.worker import Worker, WorkerTimeout
from specdec.errors import DrafterError
from specdec.plan import DraftNeeds
from specdec.tree import EMPTY, DraftTree, are_valid

FAILED = object()
"""What a guarded call gives that did not come back with a result."""

log = logging.getLogger(__name__)

DRY_NODES = 256
"""Drafted nodes without one accepted after which a drafter counts as degraded."""
FAILING_STEPS = 16
"""Steps with an error, one after the other, after which a drafter counts as degraded."""
_MOST_NODES = 4096  # a tree longer than this is cut before it is looked at, so that checking it stays cheap


class Lane:
    """Guards one drafter.

    Args:
        name: the drafter's part of a spec; the key of all its numbers.
        drafter: what to guard.
        vocab_size: ids at or above this are refused.
        timeout_s: seconds a user's drafter may take for one call.

    Attributes:
        observes: whether the drafter wants to be told of outcomes at all.
    """

    def __init__(self, name: str, drafter: Drafter, vocab_size: int, timeout_s: float) -> None:
        self.name = name
        self.drafter = drafter
        self.needs = drafter.needs
        limit = drafter.default_limit
        if not isinstance(self.needs, DraftNeeds) or not isinstance(limit, (int, np.integer)) or not 1 <= limit <= _MOST_NODES:
            raise DrafterError(
                f"drafter {name}: needs must be a DraftNeeds and default_limit between 1 and {_MOST_NODES}, "
                f"got {self.needs!r} and {limit!r}"
            )
        self.default_limit = int(limit)
        self.failed = False
        self.errors: Counter[str] = Counter()
        self.last_error: str | None = None
        self.drafted = 0
        self.accepted = 0
        self.requests: set[str] = set()
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._worker = None if _is_built_in(drafter) else Worker(f"drafter {name}")
        self.observes = type(drafter).observe is not Drafter.observe
        self._forgets = type(drafter).forget is not Drafter.forget
        self._dry = 0
        self._failing = 0
        self._was_degraded = False

    @property
    def state(self) -> str:
        """`active`; `degraded`, drafting without effect for now; or `failed`, switched off for good."""
        if self.failed:
            return "failed"
        return "degraded" if self._dry >= DRY_NODES or self._failing >= FAILING_STEPS else "active"

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One valid tree per row, within its limits; empty where the drafter has none or broke its contract."""
        self.requests.update([row.request_id for row in rows])
        trees = self._guarded("propose", lambda: self._collect(rows))
        if not isinstance(trees, list):
            return [EMPTY] * len(rows)
        if all(tree is not None for tree in trees):
            self._failing = 0
        return [EMPTY if tree is None else tree for tree in trees]

    def _collect(self, rows: Sequence[DraftRow]) -> list[DraftTree | None]:
        """Asks the drafter and checks what it gives, all within the guard: looking at its objects may run its code."""
        trees = self.drafter.propose(rows)
        count = len(trees) if isinstance(trees, (list, tuple)) else -1
        if count != len(rows):
            got = f"{count} trees" if count >= 0 else type(trees).__name__
            self._count("count", f"propose must return a list of {len(rows)} trees, one per row, got {got}")
            return [None] * len(rows)
        # what this package proposes need not be copied, and is looked at all together
        if self._worker is None and not any(row.wants_q for row in rows) and are_valid(trees, self._vocab_size):
            return [tree.limited(row.limit, row.depth) for tree, row in zip(trees, rows, strict=True)]
        return [self._checked(tree, row) for tree, row in zip(trees, rows, strict=True)]

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        self.requests.update(outcome.request_id for outcome in outcomes)
        self._guarded("observe", lambda: self.drafter.observe(outcomes))

    def forget(self, request_id: str) -> None:
        if request_id in self.requests:
            self.requests.discard(request_id)
            if self._forgets:
                self._guarded("forget", lambda: self.drafter.forget(request_id))

    def count(self, drafted: int, accepted: int) -> None:
        """Books one verified draft."""
        self.drafted += drafted
        self.accepted += accepted
        before = self.state
        self._dry = 0 if accepted else self._dry + drafted
        if self.state == "degraded" != before:
            level = logging.INFO if self._was_degraded else logging.WARNING  # one that comes and goes must not flood the log
            self._was_degraded = True
            log.log(level, "drafter %s: none of its last %d drafted tokens was accepted: degraded until one is", self.name, self._dry)

    def status(self) -> dict[str, Any]:
        """JSON values for status reports."""
        return {
            "name": self.name,
            "state": self.state,
            "limit": self.default_limit,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "errors": dict(self.errors),
            "last_error": self.last_error,
        }

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _guarded(self, what: str, call: Callable[[], object]) -> object:
        """Runs a call of the drafter; FAILED if it failed, which is booked."""
        if self.failed:
            return FAILED
        if self._worker is None:
            return self._caught(what, call)
        dtype = torch.get_default_dtype()
        result = self._caught(what, call)
        if torch.get_default_dtype() != dtype:  # of the whole process, and engines rest on it
            self._count("dtype", f"{what} set torch's default dtype to {torch.get_default_dtype()}; put back")
            torch.set_default_dtype(dtype)
        return result

    def _caught(self, what: str, call: Callable[[], object]) -> object:
        try:
            return call() if self._worker is None else self._worker.call(call, self._timeout_s)
        except WorkerTimeout:
            self.failed = True
            self._count("timeout", f"{what} gave no answer within draft_timeout_s = {self._timeout_s:g} s; switched off")
        except Exception as error:
            self._count("raised", f"{what} raised {type(error).__name__}: {_words(error)}")
        except BaseException as error:
            if self._worker is None:  # in this thread it is the user's Ctrl-C, not the drafter's doing
                raise
            self._count("raised", f"{what} raised {type(error).__name__}: {_words(error)}")
        return FAILED

    def _checked(self, tree: object, row: DraftRow) -> DraftTree | None:
        """The drafter's tree, copied, checked and cut to the row's limits; None if it is not valid."""
        try:
            if not isinstance(tree, DraftTree):
                raise DrafterError(f"propose must return DraftTrees, got {type(tree).__name__}")
            own = _copied(tree, self.needs.q, copy_q=row.wants_q and self._worker is not None)
            own.validate(self._vocab_size)
            if not row.wants_q and own.q is not None:
                own = replace(own, q=None)
            return own.limited(row.limit, row.depth)
        except Exception as error:  # a tree is the drafter's object: looking at it may raise anything
            self._count("tree", f"invalid tree: {error}")
            return None

    def _count(self, kind: str, message: str) -> None:
        """Books an error; the first of each kind is logged, so that a bad drafter does not flood the log."""
        self.errors[kind] += 1
        self.last_error = message
        self._failing += 1
        if self.errors[kind] == 1:
            log.warning("drafter %s: %s; its drafts are dropped and requests go on (told once for this kind of error)", self.name, message)


def _copied(tree: DraftTree, keep_q: bool, copy_q: bool) -> DraftTree:
    """The tree in arrays of its own; what a drafter still holds of it can change nothing.

    The q of a drafter that is trusted need not be copied, nor one that is only looked at: it is large.
    """
    tokens, parents = (_ints(array) for array in (tree.tokens, tree.parents))
    confidence = None if tree.confidence is None else np.array(tree.confidence, dtype=np.float32)
    q = tree.q if keep_q else None
    if q is not None:
        if not isinstance(q, torch.Tensor) or not q.is_floating_point():
            raise DrafterError(f"q must be a float32 tensor, got {q.dtype if isinstance(q, torch.Tensor) else type(q).__name__}")
        q = (q[:_MOST_NODES].detach().clone() if copy_q else q[:_MOST_NODES].detach()).float()
    if confidence is not None:
        confidence = confidence[:_MOST_NODES]
    return DraftTree(tokens, parents, confidence, q)


def _ints(values: Any) -> Any:  # from whatever the drafter put there, to an int32 array
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DrafterError(f"tokens and parents must be one-dimensional integer arrays, got shape {array.shape} of {array.dtype}")
    array = array[:_MOST_NODES]
    info = np.iinfo(np.int32)
    if int(array.min()) < info.min or int(array.max()) > info.max:
        raise DrafterError(f"tokens and parents must fit 32 bits, got {int(array.min())} to {int(array.max())}")
    return array.astype(np.int32)


def _is_built_in(drafter: Drafter) -> bool:
    """Whether this package vouches for the drafter; a FunctionDrafter is as good as its function."""
    return type(drafter).__module__.startswith("specdec.drafters.") and not isinstance(drafter, FunctionDrafter)


def _words(error: BaseException) -> str:
    """What an exception says; it is the drafter's object, and asking it may raise anything."""
    try:
        return str(error)
    except Exception:
        return "(its message cannot be had)"
