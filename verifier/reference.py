"""Plain references of the verification rules: float64, one request, loops. The fast forms are tested against them.

They take their random numbers as an argument, so that the same code runs with a request's coins, with fixed coins, and
under `specdec.testing.prover`, which follows every branch and so computes the law of what is emitted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specdec.tree import DraftTree
from specdec.verifier.base import Decision
from specdec.verifier.coins import Floats, Randomness

ReferenceRule = Callable[[DraftTree, Floats, Randomness], Decision]
"""(tree, p, randomness) -> Decision.

p: float64 [n + 1, vocabulary], the target's distribution at the root, then after every node. `tree.q`: [n, vocabulary],
what each node was really drawn from given its earlier siblings, or None where all nodes are functions of the text.
"""


def coupled(tree: DraftTree, p: Floats, randomness: Randomness) -> Decision:
    """Draw from the target and follow the child that was drawn; noise that does not depend on the draft."""
    children = tree.children()
    node = -1
    path: list[int] = []
    while True:
        token = randomness.draw(len(path), p[node + 1])
        match = next((child for child in children.get(node, ()) if tree.tokens[child] == token), None)
        if match is None:
            return Decision(tuple(path), token)
        node = match
        path.append(node)


def rejection(tree: DraftTree, p: Floats, randomness: Randomness) -> Decision:
    """Recursive rejection sampling: try children in order, and continue with what a rejected one leaves of the target.

    Leviathan, Kalman and Matias 2023 (arXiv 2211.17192, algorithm 1) and Chen et al. 2023 (arXiv 2302.01318) for chains;
    for trees Yang et al. 2024 (multi-candidate speculative decoding, arXiv 2401.06706) and Jeon et al. 2024 (recursive
    speculative decoding, arXiv 2402.14160). Each child is weighed against the distribution it was itself drawn from.
    """
    children = tree.children()
    node = -1
    path: list[int] = []
    while True:
        target = p[node + 1]
        current = target / target.sum()
        for child in children.get(node, ()):
            token, q = int(tree.tokens[child]), _proposal(tree, child, p.shape[1])
            if randomness.accept(child, _ratio(current[token], q[token])):
                break
            rest = np.maximum(current - q, 0.0)
            current = rest / rest.sum() if rest.sum() > 0 else _certain(target)
        else:
            return Decision(tuple(path), randomness.draw(len(path), current))
        node = child
        path.append(node)


def traversal(tree: DraftTree, p: Floats, randomness: Randomness) -> Decision:
    """Traversal verification: leaves first, accepting a whole path at once (Weng et al. 2025, arXiv 2505.12398).

    On a chain it is block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2). It accepts at least as much as
    `rejection` in expectation.
    """
    children = tree.children()

    def visit(node: int, mass: float, path: tuple[int, ...]) -> Decision | None:
        """The decision if a path through `node`, which carries `mass`, is accepted."""
        target = p[node + 1]
        current = target / target.sum()
        for child in children.get(node, ()):
            token, q = int(tree.tokens[child]), _proposal(tree, child, p.shape[1])
            found = visit(child, _ratio(mass * current[token], q[token]), (*path, child))
            if found is not None:
                return found
            rest = np.maximum(mass * current - q, 0.0)
            total = float(rest.sum())
            current = rest / total if total > 0 else _certain(target)
            mass = 1.0 if mass >= 1 else total / (total + 1 - mass)
        if node < 0 or randomness.accept(node, mass):
            return Decision(path, randomness.draw(len(path), current))
        return None

    decision = visit(-1, 1.0, ())
    assert decision is not None  # the root is always accepted
    return decision


REFERENCES: dict[str, ReferenceRule] = {"coupled": coupled, "rejection": rejection, "traversal": traversal}


def _proposal(tree: DraftTree, node: int, vocab_size: int) -> Floats:
    """float64 [vocabulary]: what a node was drawn from; all on its own token where the tree says nothing usable."""
    token = int(tree.tokens[node])
    if tree.q is not None:
        q = np.asarray(tree.q[node], dtype=np.float64)
        total = q.sum()
        if np.isfinite(total) and q.min() >= 0 and q[token] > 0:
            return np.asarray(q / total)
    own = np.zeros(vocab_size)
    own[token] = 1.0
    return own


def _ratio(p: float, q: float) -> float:
    """min(1, p / q)."""
    return 1.0 if p >= q else float(p / q)


def _certain(target: Floats) -> Floats:
    """All on the most probable token: where a residual is empty, which only rounding can bring about."""
    own = np.zeros_like(target)
    own[int(target.argmax())] = 1.0
    return own
