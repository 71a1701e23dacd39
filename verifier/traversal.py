"""Traversal verification: leaves first, a whole path at once; on a chain it is block verification.

The papers are named in `specdec.verifier.reference.traversal`, which this does fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from specdec.verifier.weighing import End, WeighedDraft, WeighingRule


@dataclass
class _Node:
    """A node on the path that is being tried.

    Attributes:
        node: -1 for the root.
        mass: the chance with which the path to it would be accepted if its children were gone.
        children: those not tried yet.
        current: the target after the node, less what rejected children took; computed when a child needs it.
    """

    node: int
    mass: float
    children: Iterator[int] = field(default_factory=lambda: iter(()))
    current: Tensor | None = None


class TraversalRule(WeighingRule):
    """Implements `specdec.verifier.base.Rule`."""

    def verify(self, draft: WeighedDraft) -> End:
        stack = [_entered(draft, -1, 1.0)]
        while True:
            top = stack[-1]
            child = next(top.children, None)
            if child is not None:
                mass = _mass(draft, top, child)
                if mass > 0:
                    stack.append(_entered(draft, child, mass))
                else:
                    _reject(draft, top, child)
            elif top.node < 0 or draft.accepts(top.node, top.mass, 1.0):
                path = tuple(entry.node for entry in stack[1:])
                return End(path, draft.target(top.node) if top.current is None else top.current)
            else:
                stack.pop()
                _reject(draft, stack[-1], top.node)


def _entered(draft: WeighedDraft, node: int, mass: float) -> _Node:
    children = draft.children.get(node, [])
    if not children:
        return _Node(node, mass)
    current = draft.target(node)
    return _Node(node, mass, iter(children if current is not None else ()), current)


def _mass(draft: WeighedDraft, above: _Node, child: int) -> float:
    """min(1, m P(t) / Q(t))."""
    assert above.current is not None  # it has a child
    token, q = draft.tokens[child], draft.proposal(child)
    p = above.mass * float(above.current[token])
    return min(1.0, p / float(q[token])) if q is not None else p


def _reject(draft: WeighedDraft, above: _Node, child: int) -> None:
    """Takes a child's proposal out of the node above it: P <- norm((m P - Q)+), m <- S / (S + 1 - m)."""
    assert above.current is not None  # it has a child
    q = draft.proposal(child)
    rest = above.current.mul_(above.mass)
    if q is None:
        rest[draft.tokens[child]] = 0
    else:
        rest.sub_(q).clamp_(min=0)
    total = float(rest.sum())
    above.current = rest.div_(total) if total > 0 else draft.certain(above.node)
    above.mass = 1.0 if above.mass >= 1 else total / (total + 1 - above.mass)
