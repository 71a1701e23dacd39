"""Computes the exact law of what a verification rule emits, on tiny vocabularies, and compares it with the target's.

A rule is a function of (tree, p, randomness), like those of `specdec.verifier.reference`. It is run once for every way
in which the draws of the draft and the coins of the rule can fall, and the weights of the ways are added up: no samples,
no tolerance but rounding. `python -m specdec.testing.prover` prints the table for the rules that specdec has.

    proof = prove(my_rule, sampled(2, 1), random_law(3, seed=1), random_law(3, seed=2))
    assert proof.error < 1e-12
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from specdec.drafters.merge import merge_trees
from specdec.tree import EMPTY, DraftTree
from specdec.verifier.coins import Floats, Randomness
from specdec.verifier.reference import REFERENCES, ReferenceRule

Prefix = tuple[int, ...]
Law = Callable[[Prefix], Floats]
"""What comes after some tokens: float64 [vocabulary]."""
Draft = Callable[[Law, Randomness], DraftTree]
"""Makes a draft from q, with whatever randomness it wants; `tree.q` is float64 [n, vocabulary] or None."""
Result = TypeVar("Result")


class _Branch:
    """Implements `Randomness` by following a script, then the first possible branch, noting the others."""

    def __init__(self, script: Sequence[int]) -> None:
        self.weight = 1.0
        self.others: list[list[int]] = []
        self._script = script
        self._taken: list[int] = []

    def accept(self, node: int, chance: float) -> bool:
        return self._pick([1 - chance, chance]) == 1

    def draw(self, depth: int, weights: Floats) -> int:
        return self._pick((weights / weights.sum()).tolist())

    def _pick(self, chances: Sequence[float]) -> int:
        place = len(self._taken)
        if place < len(self._script):
            choice = self._script[place]
        else:
            choice, *others = (option for option, chance in enumerate(chances) if chance > 0)
            self.others += [[*self._taken, other] for other in others]
        self._taken.append(choice)
        self.weight *= chances[choice]
        return choice


def branches(run: Callable[[Randomness], Result]) -> Iterator[tuple[float, Result]]:
    """Every way in which `run` can go, with its probability. `run` must ask for all its randomness."""
    scripts: list[list[int]] = [[]]
    while scripts:
        branch = _Branch(scripts.pop())
        result = run(branch)
        scripts += branch.others
        yield branch.weight, result


@dataclass(frozen=True)
class Proof:
    """What `prove` found.

    Attributes:
        error: largest difference between the law of the emitted sequence and the target's, over all sequences.
        accepted: expected accepted nodes per step.
        num_branches: ways that were followed.
    """

    error: float
    accepted: float
    num_branches: int


def prove(rule: ReferenceRule, draft: Draft, p: Law, q: Law) -> Proof:
    """The exact law of a step, drafting included.

    What a step emits is continued by p to one token more than the deepest draft, so that steps compare.
    """

    def step(randomness: Randomness) -> tuple[Prefix, int]:
        tree = draft(q, randomness)
        paths = [(), *(tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree)))]
        decision = rule(tree, np.stack([p(path) for path in paths]), randomness)
        return (*paths[decision.path[-1] + 1 if decision.path else 0], decision.token), len(decision.path)

    emitted: dict[Prefix, float] = {}
    accepted, count = 0.0, 0
    for weight, (tokens, nodes) in branches(step):
        emitted[tokens] = emitted.get(tokens, 0.0) + weight
        accepted += weight * nodes
        count += 1
    return Proof(_error(emitted, p), accepted, count)


def _error(emitted: dict[Prefix, float], p: Law) -> float:
    length = max(map(len, emitted))
    found: dict[Prefix, float] = {}
    for tokens, weight in emitted.items():
        for rest in itertools.product(range(len(p(()))), repeat=length - len(tokens)):
            whole = tokens + rest
            found[whole] = found.get(whole, 0.0) + weight * _chance(whole, len(tokens), p)
    everything = itertools.product(range(len(p(()))), repeat=length)
    return max(abs(found.get(whole, 0.0) - _chance(whole, 0, p)) for whole in everything)


def _chance(tokens: Prefix, start: int, p: Law) -> float:
    """That p continues `tokens[:start]` with the rest of `tokens`."""
    return float(np.prod([p(tokens[:place])[tokens[place]] for place in range(start, len(tokens))]))


# Laws and drafts to prove with


def fixed_law(chances: Sequence[float]) -> Law:
    """The same distribution after everything."""
    values = np.asarray(chances, dtype=np.float64)
    return lambda _prefix: values


def random_law(vocab_size: int, seed: int, zeros: int = 0) -> Law:
    """A random distribution for every prefix; `zeros` of the tokens have no chance."""
    known: dict[Prefix, Floats] = {}

    def law(prefix: Prefix) -> Floats:
        if prefix not in known:
            random = np.random.default_rng([seed, len(prefix), *prefix])
            weights = random.exponential(size=vocab_size) ** 2
            weights[random.permutation(vocab_size)[:zeros]] = 0
            known[prefix] = weights / weights.sum()
        return known[prefix]

    return law


def sampled(*widths: int, replace: bool = False) -> Draft:
    """A tree whose nodes of level i have `widths[i]` children each, drawn from q without replacement, or with it."""

    def children(law: Floats, randomness: Randomness, depth: int, width: int) -> list[tuple[int, Floats]]:
        drawn = []
        for _ in range(min(width, int((law > 0).sum()))):
            law = law / law.sum()
            token = randomness.draw(depth, law)
            drawn.append((token, law))
            if not replace:
                law = law.copy()
                law[token] = 0
        return drawn

    return _tree(widths, children)


def likeliest(*widths: int) -> Draft:
    """A tree of the most probable tokens of q: a function of the text alone, so it says no q."""

    def children(law: Floats, randomness: Randomness, depth: int, width: int) -> list[tuple[int, None]]:
        return [(int(token), None) for token in np.argsort(-law, kind="stable")[:width]]

    return _tree(widths, children)


def given(*paths: Sequence[int]) -> Draft:
    """Paths of tokens side by side, equal beginnings and all."""

    def draft(q: Law, randomness: Randomness) -> DraftTree:
        tokens = np.concatenate([np.asarray(path, dtype=np.int32) for path in paths])
        parents = np.concatenate([_chain(len(path), sum(map(len, paths[:place]))) for place, path in enumerate(paths)])
        return DraftTree(tokens, parents)

    return draft


def merged(*drafts: Draft) -> Draft:
    """Several drafts as the engine merges them under rules that read q. Each may have a q of its own: see `drawn_from`."""

    def draft(q: Law, randomness: Randomness) -> DraftTree:
        trees = [one(q, randomness) for one in drafts]
        torches = [DraftTree(t.tokens, t.parents, q=None if t.q is None else torch.from_numpy(t.q)) for t in trees]
        return merge_trees(torches, sum(map(len, trees)))

    return draft


def drawn_from(q: Law, draft: Draft) -> Draft:
    """A draft with a q of its own."""
    return lambda _q, randomness: draft(q, randomness)


Children = Callable[[Floats, Randomness, int, int], Sequence[tuple[int, Floats | None]]]


def _tree(widths: Sequence[int], children: Children) -> Draft:
    def draft(q: Law, randomness: Randomness) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        sources: list[Floats | None] = []
        front: list[tuple[int, Prefix]] = [(-1, ())]
        for depth, width in enumerate(widths):
            above, front = front, []
            for node, prefix in above:
                for token, source in children(q(prefix), randomness, depth, width):
                    front.append((len(tokens), (*prefix, token)))
                    tokens.append(token)
                    parents.append(node)
                    sources.append(source)
        if not tokens:
            return EMPTY
        said = [source for source in sources if source is not None]
        return DraftTree(np.asarray(tokens, dtype=np.int32), np.asarray(parents, dtype=np.int32), q=np.stack(said) if said else None)

    return draft


def _chain(length: int, start: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    parents = np.arange(start - 1, start + length - 1, dtype=np.int32)
    parents[0] = -1
    return parents


# The coupled rule with drafts that share its noise


def race_law(p: Floats, q: Floats) -> Floats:
    """Two races with the same noise: who wins the first, and as which he comes in in the second.

    With E_x exponential, y = argmin E_x / p(x). Given E_y, every other x has independently lost the first race, and is
    ahead of y in the second if E_x / q(x) < E_y / q(y). The chance that just the set B is ahead, integrated over E_y, is

        sum over C in B of (-1)^|C| / (sum over x not in B, or in C, of max(p(x)/p(y), q(x)/q(y)) + sum over B \\ C of p(x)/p(y))

    Returns:
        float64 [vocabulary, vocabulary + 1]: P(y, number ahead of y in the second race); the last column is for those
        that q gives no chance. Rows add up to p.
    """
    size = len(p)
    law = np.zeros((size, size + 1))
    for y in range(size):
        if p[y] == 0:
            continue
        slow = p / p[y]
        if q[y] == 0:
            law[y, size] = 1 / slow.sum()
            continue
        fast = np.maximum(slow, q / q[y])
        rivals = [x for x in range(size) if x != y]
        for count in range(size):
            for ahead in itertools.combinations(rivals, count):
                for places in range(count + 1):
                    for back in itertools.combinations(ahead, places):
                        free = [x for x in ahead if x not in back]
                        behind = [x for x in range(size) if x not in free]
                        law[y, count] += (-1) ** places / (fast[behind].sum() + slow[free].sum())
    return law


def pair_law(p: Floats, q: Floats) -> Floats:
    """float64 [vocabulary, vocabulary]: P(y, d) of y = argmin E/p and d = argmin E/q with the same noise E.

    For y != d it is the integral of p(y) q(d) / S(r)^2 over r from p(d)/q(d) to p(y)/q(y), S(r) = sum of max(p, q r).
    """
    law = np.zeros((len(p), len(p)))
    ratios = np.sort(np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0))
    for y, d in itertools.product(range(len(p)), repeat=2):
        if p[y] == 0 or q[d] == 0:
            continue
        if y == d:
            law[y, y] = 1 / np.maximum(p / p[y], q / q[y]).sum()
            continue
        low, high = p[d] / q[d], p[y] / q[y] if q[y] > 0 else np.inf
        if high <= low:
            continue
        borders = [low, *(r for r in ratios if low < r < high), high]
        law[y, d] = p[y] * q[d] * sum(_inverse_square(p, q, left, right) for left, right in itertools.pairwise(borders))
    return law


def _inverse_square(p: Floats, q: Floats, left: float, right: float) -> float:
    """The integral of 1 / (sum of max(p, q r))^2 over r between two neighbouring ratios p / q."""
    grows = q * left >= p * (1 - 1e-15)
    base, slope = float(p[~grows].sum()), float(q[grows].sum())
    if np.isinf(right):
        return 1 / (slope * (base + slope * left))
    return (right - left) / ((base + slope * left) * (base + slope * right))


def prove_shared(p: Law, q: Law, *widths: int) -> Proof:
    """`prove` for the coupled rule and a tree whose children are the first of the race with the target's own noise."""
    emitted: dict[Prefix, float] = {}
    accepted, count = 0.0, 0
    going: list[tuple[Prefix, float]] = [((), 1.0)]
    for width in widths:
        above, going = going, []
        for prefix, weight in above:
            for token, ranks in enumerate(race_law(p(prefix), q(prefix))):
                on, out = weight * ranks[:width].sum(), weight * ranks[width:].sum()
                going.append(((*prefix, token), on))
                emitted[*prefix, token] = emitted.get((*prefix, token), 0.0) + out
                accepted += on
                count += 2
    for prefix, weight in going:  # all accepted: the bonus is the target's
        for token, chance in enumerate(p(prefix)):
            emitted[*prefix, token] = emitted.get((*prefix, token), 0.0) + weight * float(chance)
            count += 1
    return Proof(_error(emitted, p), accepted, count)


# The table


@dataclass(frozen=True)
class Case:
    """A draft to prove the rules with. `shared` widths say that it can also be drawn with the target's own noise."""

    name: str
    draft: Draft
    vocab_size: int = 3
    shared: tuple[int, ...] = ()


CASES = (
    Case("chain of 1", sampled(1), 4, (1,)),
    Case("chain of 2", sampled(1, 1), 3, (1, 1)),
    Case("chain of 3", sampled(1, 1, 1), 3, (1, 1, 1)),
    Case("2 children, without replacement", sampled(2), 4, (2,)),
    Case("3 children, without replacement", sampled(3), 4, (3,)),
    Case("2-1, without replacement", sampled(2, 1), 3, (2, 1)),
    Case("2-2, without replacement", sampled(2, 2), 3, (2, 2)),
    Case("3-1, without replacement", sampled(3, 1), 3, (3, 1)),
    Case("2 children, with replacement", sampled(2, replace=True), 4),
    Case("2-1, with replacement", sampled(2, 1, replace=True), 3),
    Case("3 children, with replacement", sampled(3, replace=True), 4),
    Case("2 fixed children", likeliest(2), 4),
    Case("3-1 fixed", likeliest(3, 1), 4),
    Case("2-2-1 fixed", likeliest(2, 2, 1), 3),
    Case("duplicate children", given([0], [0]), 4),
    Case("duplicate paths", given([0, 1], [0, 1], [0, 2]), 3),
    Case("fixed + drawn chain", merged(likeliest(1, 1), sampled(1, 1)), 3),
    Case("drawn + fixed chain", merged(sampled(1, 1), likeliest(1, 1)), 3),
    Case("fixed 2 + drawn 2", merged(likeliest(2), sampled(2)), 4),
    Case("two drafters' draws", merged(sampled(1, 1), drawn_from(random_law(3, 9), sampled(1, 1))), 3),
)
"""What the table shows; every rule must be exact on each."""


def laws_of(case: Case) -> tuple[Law, Law]:
    """The p and q of a case; p gives one token in four no chance."""
    return random_law(case.vocab_size, seed=1, zeros=case.vocab_size // 4), random_law(case.vocab_size, seed=2)


def prove_case(case: Case) -> dict[str, Proof]:
    """Rule -> proof; `shared` is the coupled rule with drafts that share its noise."""
    p, q = laws_of(case)
    proofs = {name: prove(rule, case.draft, p, q) for name, rule in REFERENCES.items()}
    if case.shared:
        proofs["shared"] = prove_shared(p, q, *case.shared)
    return proofs


def main() -> None:
    """Prints the table."""
    print("largest error of the law of what is emitted, and expected accepted nodes per step\n")
    print("| draft | coupled, other noise | coupled, shared noise | rejection | traversal | branches |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        proofs = prove_case(case)
        cells = [
            f"{proofs[rule].error:.0e} / {proofs[rule].accepted:.4f}" if rule in proofs else "-"
            for rule in ("coupled", "shared", "rejection", "traversal")
        ]
        print(f"| {case.name} | {' | '.join(cells)} | {sum(proof.num_branches for proof in proofs.values())} |", flush=True)


if __name__ == "__main__":
    main()
