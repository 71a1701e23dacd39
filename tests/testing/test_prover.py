"""The prover on every rule, on rules that are wrong in the ways known from the field, and on numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.testing.prover import (
    CASES,
    Case,
    Law,
    branches,
    drawn_from,
    fixed_law,
    given,
    laws_of,
    likeliest,
    main,
    merged,
    pair_law,
    prove,
    prove_case,
    prove_shared,
    race_law,
    random_law,
    sampled,
)
from specdec.tree import DraftTree
from specdec.verifier.base import Decision
from specdec.verifier.coins import Floats, Randomness
from specdec.verifier.reference import coupled, rejection, traversal

P = np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02, 0.0])
Q = np.array([0.02, 0.03, 0.05, 0.1, 0.1, 0.2, 0.25, 0.25])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rule_is_exact_and_traversal_accepts_most(case: Case) -> None:
    proofs = prove_case(case)
    assert all(proof.error < 1e-12 for proof in proofs.values())
    assert proofs["traversal"].accepted >= proofs["rejection"].accepted - 1e-12
    assert proofs["rejection"].accepted >= proofs["coupled"].accepted - 1e-12  # noise of its own helps no draft
    if "shared" in proofs:
        assert proofs["shared"].accepted > proofs["coupled"].accepted


@pytest.mark.parametrize("seed", range(5))
def test_traversal_gains_on_rejection_where_paths_are_long(seed: int) -> None:
    p, q = random_law(3, seed=10 + seed), random_law(3, seed=20 + seed)
    one, other = (prove(rule, sampled(1, 1, 1), p, q) for rule in (rejection, traversal))
    assert max(one.error, other.error) < 1e-12 and other.accepted > one.accepted


# Computed exactly from these two laws


def at_root(rule: object, draft: object) -> float:
    proof = prove(rule, draft, fixed_law(P), fixed_law(Q))  # type: ignore[arg-type]
    assert proof.error < 1e-12
    return proof.accepted


@pytest.mark.parametrize("rule", [rejection, traversal])
def test_the_acceptance_of_drawn_tokens_is_what_p_and_q_share(rule: object) -> None:
    assert at_root(rule, sampled(1)) == pytest.approx(0.300)
    assert at_root(rule, sampled(2, replace=True)) == pytest.approx(0.370, abs=5e-4)
    assert at_root(rule, given([0], [1])) == pytest.approx(0.700)
    assert at_root(rule, given([0], [0])) == pytest.approx(0.500)
    assert [at_root(rule, given([token])) for token in (2, 6, 7)] == pytest.approx([0.100, 0.020, 0.0])
    cut = np.where(np.arange(8) < 2, P, 0) / 0.7
    assert prove(rule, sampled(1), fixed_law(cut), fixed_law(Q)).accepted == pytest.approx(0.050)  # type: ignore[arg-type]


def test_a_chain_of_three_gives_1417_tokens_in_a_thousand_steps() -> None:
    assert at_root(rejection, sampled(1, 1, 1)) == pytest.approx(0.417)
    assert at_root(traversal, sampled(1, 1, 1)) > 0.417


def test_drafts_that_share_the_noise_are_accepted_as_the_closed_form_says() -> None:
    assert prove_shared(fixed_law(P), fixed_law(Q), 1).accepted == pytest.approx(0.2322, abs=5e-5)
    assert prove_shared(fixed_law(P), fixed_law(Q), 2).accepted == pytest.approx(0.354, abs=5e-4)
    assert at_root(coupled, sampled(1)) == pytest.approx(0.047, abs=5e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_laws_of_two_races_with_one_noise_agree(seed: int) -> None:
    random = np.random.default_rng(seed)
    p, q = random.exponential(size=(2, 5)) ** 2
    p[seed], q[(2 * seed) % 5] = 0, 0
    p, q = p / p.sum(), q / q.sum()
    ranks, pairs = race_law(p, q), pair_law(p, q)
    assert np.allclose(ranks.sum(1), p, rtol=0, atol=1e-12) and np.allclose(pairs.sum(1), p, rtol=0, atol=1e-12)
    assert np.allclose(pairs.sum(0), q, rtol=0, atol=1e-12)
    assert np.allclose(np.diag(pairs), ranks[:, 0], rtol=0, atol=1e-12)
    noise = random.exponential(size=(200_000, 5))
    with np.errstate(divide="ignore"):
        first, second = (noise / p).argmin(1), (noise / q).argsort(1)
    for y in range(5):
        for width in (1, 2, 3):
            found = ((first == y) & (second[:, :width] == y).any(1)).mean()
            assert abs(found - ranks[y, :width].sum()) < 0.006


# Rules that are wrong


def sloppy_rejection(residual: str) -> object:
    """Rejection with a residual as engines have got it wrong."""

    def rule(tree: DraftTree, p: Floats, randomness: Randomness) -> Decision:
        current, total = p[0], tree.q
        for child in tree.children().get(-1, []):
            token, q = int(tree.tokens[child]), total[child]
            if randomness.accept(child, min(1.0, current[token] / q[token])):
                return Decision((child,), randomness.draw(1, p[child + 1]))
            if residual == "target":
                continue
            left = np.maximum(current - (q if residual == "whole" else np.eye(len(q))[token] * q[token]), 0)
            current = left / left.sum()
        return Decision((), randomness.draw(0, p[0] if residual == "target" else current))

    return rule


def test_the_prover_sees_wrong_residuals() -> None:
    p, q = fixed_law(P), fixed_law(Q)
    assert prove(sloppy_rejection("whole"), sampled(1), p, q).error < 1e-12  # type: ignore[arg-type]
    assert prove(sloppy_rejection("target"), sampled(1), p, q).error > 0.05  # type: ignore[arg-type]
    assert prove(sloppy_rejection("token"), sampled(2), p, q).error > 0.01  # type: ignore[arg-type]


def test_the_prover_sees_that_dropping_duplicates_of_drawn_tokens_is_biased() -> None:
    """A fixed child, and a drawn one that is dropped where it is the same."""

    def deduplicated(q: Law, randomness: Randomness) -> DraftTree:
        tree = merged(likeliest(1), sampled(1))(q, randomness)
        return tree if tree.tokens[0] != tree.tokens[1] else tree.limited(1, 1)

    p, q = laws_of(Case("", deduplicated, 4))
    for rule in (rejection, traversal):
        assert prove(rule, deduplicated, p, q).error > 1e-2
        assert prove(rule, merged(likeliest(1), sampled(1)), p, q).error < 1e-12
    assert prove(coupled, deduplicated, p, q).error < 1e-12


def test_the_prover_sees_that_cutting_at_an_unlikely_draw_is_biased() -> None:
    """Non-anticipation: whether a node is verified may not depend on what was drawn there, but under the coupled rule it may."""

    def cut(q: Law, randomness: Randomness) -> DraftTree:
        tree = sampled(1, 1)(q, randomness)
        return tree.limited(1, 1) if tree.q[1][int(tree.tokens[1])] < 0.5 else tree

    p, q = random_law(3, 1), random_law(3, 2)
    assert prove(rejection, cut, p, q).error > 1e-3
    assert prove(traversal, cut, p, q).error > 1e-3
    assert prove(coupled, cut, p, q).error < 1e-12


def test_two_drafters_that_draw_alike_would_be_biased_and_drawing_apart_are_not() -> None:
    p, q = fixed_law(P), fixed_law(Q)  # type: ignore[arg-type]  # arrays are sequences

    def alike(law: Law, randomness: Randomness) -> DraftTree:
        tree = sampled(1)(law, randomness)
        return DraftTree(np.repeat(tree.tokens, 2), np.array([-1, -1], dtype=np.int32), q=np.repeat(tree.q, 2, 0))

    assert prove(rejection, alike, p, q).error > 1e-2
    assert prove(rejection, merged(sampled(1), drawn_from(q, sampled(1))), p, q).error < 1e-12


def test_branches_have_weights_that_add_up() -> None:
    def run(randomness: Randomness) -> tuple[bool, int]:
        return randomness.accept(0, 0.25), randomness.draw(0, np.array([1.0, 0.0, 3.0]))

    found = {result: weight for weight, result in branches(run)}
    assert found == {(True, 0): 0.0625, (True, 2): 0.1875, (False, 0): 0.1875, (False, 2): 0.5625}


def test_the_command_prints_a_line_per_draft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("specdec.testing.prover.CASES", CASES[:2])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[-2:]] == [case.name for case in CASES[:2]]
