"""The fast rules against their references, with the same coins, and at the edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.backend.cpu import CPUBackend
from specdec.kernels.reference import philox
from specdec.request import Request, SamplingParams
from specdec.tree import EMPTY, DraftTree
from specdec.verifier.base import Decision, RowNodes
from specdec.verifier.coins import Floats, PhiloxRandomness, accept_coins
from specdec.verifier.coupled import CoupledRule
from specdec.verifier.reference import REFERENCES
from specdec.verifier.rejection import RejectionRule
from specdec.verifier.sampling import choice_batch, probabilities
from specdec.verifier.traversal import TraversalRule
from specdec.verifier.weighing import WeighingRule

P = [0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02, 0.0]
Q = [0.02, 0.03, 0.05, 0.1, 0.1, 0.2, 0.25, 0.25]
SAMPLED = SamplingParams(temperature=1.0)
FAST: dict[str, type[WeighingRule]] = {"rejection": RejectionRule, "traversal": TraversalRule}
RULES = pytest.mark.parametrize("name", FAST)


def zeros(seed: int, length: int, count: int) -> Floats:
    """Coins that accept whatever can be accepted."""
    return np.zeros(count)


def ones(seed: int, length: int, count: int) -> Floats:
    """Coins that reject whatever can be rejected."""
    return np.full(count, 1 - 2.0**-32)


def row_of(tree: DraftTree, params: SamplingParams = SAMPLED, seed: int = 0, index: int = 0, start: int = 0, length: int = 5) -> RowNodes:
    return RowNodes(index, Request(f"r{index}", [1] * length, 1, params, seed, 99), tree, start, length)


def batch_of(drafts: Sequence[tuple[DraftTree, SamplingParams]]) -> list[RowNodes]:
    rows: list[RowNodes] = []
    start = 0
    for index, (tree, params) in enumerate(drafts):
        rows.append(row_of(tree, params, seed=index * 7919, index=index, start=start, length=5 + index))
        start += len(tree) + 1
    return rows


def random_tree(random: np.random.Generator, vocab_size: int) -> DraftTree:
    """Up to 9 nodes, drawn from their q, fixed, or with q that is nonsense; siblings may be equal."""
    n = int(random.integers(0, 10))
    if n == 0:
        return EMPTY
    parents = np.array([random.integers(-1, node) if node else -1 for node in range(n)], dtype=np.int32)
    q = random.exponential(size=(n, vocab_size)) ** 3
    q[:, random.integers(vocab_size)] = 0
    q /= q.sum(1, keepdims=True)
    tokens = np.array([random.choice(vocab_size, p=row) for row in q], dtype=np.int32)
    for node in range(n):
        if random.random() < 0.2:
            q[node] = np.eye(vocab_size)[tokens[node]]
        elif random.random() < 0.1:
            q[node] = random.choice([0.0, np.nan, -1.0])
    return DraftTree(tokens, parents, q=torch.from_numpy(q).float() if random.random() < 0.8 else None)


def random_params(random: np.random.Generator) -> SamplingParams:
    filters: dict[str, float] = {}
    if random.random() < 0.5:
        filters = {"top_k": int(random.integers(1, 6))} if random.random() < 0.5 else {"top_p": 0.8, "min_p": 0.05}
    return SamplingParams(temperature=float(random.choice([0.5, 1.0, 2.0])), **filters)  # type: ignore[arg-type]  # mixed values


def reference_decision(name: str, row: RowNodes, logits: Tensor) -> Decision:
    own = logits[row.start : row.start + row.count].double()
    p = probabilities(own, choice_batch([row.request], row.positions(), [row.count])).numpy()
    return REFERENCES[name](row.tree, p, PhiloxRandomness(row.request.seed, row.length))


@RULES
def test_the_fast_form_decides_as_the_reference_does(name: str) -> None:
    random = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        vocab_size = int(random.integers(2, 30))
        rows = batch_of([(random_tree(random, vocab_size), random_params(random)) for _ in range(5)])
        logits = torch.from_numpy(random.normal(size=(sum(row.count for row in rows), vocab_size)) * 2).float()
        before = logits.clone(), [None if row.tree.q is None else row.tree.q.clone() for row in rows]
        decisions = FAST[name](CPUBackend()).decide(rows, logits)
        assert decisions == [reference_decision(name, row, logits) for row in rows]
        assert torch.equal(logits, before[0])
        for row, q in zip(rows, before[1], strict=True):
            assert q is None or torch.equal(row.tree.q.nan_to_num(nan=-7.0), q.nan_to_num(nan=-7.0))
        seen |= {len(decision.path) for decision in decisions}
    assert {0, 1, 2, 3} <= seen


@RULES
def test_a_row_decides_alike_alone_and_among_others(name: str) -> None:
    random = np.random.default_rng(1)
    rows = batch_of([(random_tree(random, 12), random_params(random)) for _ in range(8)])
    logits = torch.from_numpy(random.normal(size=(sum(row.count for row in rows), 12))).float()
    rule = FAST[name](CPUBackend())
    together = rule.decide(rows, logits)
    assert [rule.decide([row], logits)[0] for row in rows] == together
    assert rule.decide(rows[::-1], logits) == together[::-1]


@RULES
def test_greedy_rows_are_walked_as_by_the_coupled_rule(name: str) -> None:
    random = np.random.default_rng(2)
    greedy = SamplingParams(temperature=0)
    rows = batch_of([(random_tree(random, 4), greedy if index % 2 else SAMPLED) for index in range(10)])
    logits = torch.from_numpy(random.normal(size=(sum(row.count for row in rows), 4))).float()
    decisions = FAST[name](CPUBackend()).decide(rows, logits)
    assert decisions[1::2] == CoupledRule(CPUBackend()).decide(rows[1::2], logits)
    assert any(decision.path for decision in decisions[1::2])


@RULES
def test_a_token_without_a_chance_is_never_accepted_even_by_a_coin_of_zero(name: str) -> None:
    logits = torch.tensor([P, P, P]).log()
    rule = FAST[name](CPUBackend(), zeros)
    for q in (torch.tensor([Q, Q]), None):
        tree = DraftTree.chain([7, 0], q=q)
        for seed in range(50):
            (decision,) = rule.decide([row_of(tree, seed=seed)], logits)
            assert decision.path == () and decision.token != 7
    (decision,) = rule.decide([row_of(DraftTree.chain([6, 0], q=torch.tensor([Q, Q])))], logits)
    assert decision.path == (0, 1)


@RULES
def test_filtered_tokens_have_no_chance(name: str) -> None:
    logits = torch.tensor([P, P]).log()
    rule = FAST[name](CPUBackend(), zeros)
    params = SamplingParams(temperature=1.0, top_k=2)
    assert rule.decide([row_of(DraftTree.chain([2], q=torch.tensor([Q])), params)], logits)[0].path == ()
    assert rule.decide([row_of(DraftTree.chain([1], q=torch.tensor([Q])), params)], logits)[0].path == (0,)
    tokens = {rule.decide([row_of(EMPTY, params, seed)], logits)[0].token for seed in range(50)}
    assert tokens == {0, 1}


@RULES
def test_an_empty_residual_gives_the_most_probable_token(name: str) -> None:
    """Equal p and q leave nothing behind a rejection, which only forced coins can bring about."""
    certain = torch.tensor([[0.0, 9.0, 0.0, -torch.inf]] * 3)
    q = torch.softmax(certain[:2], dim=-1)
    always = lambda seed, length, count: np.full(count, 1.5)  # noqa: E731  # a coin that no chance can beat
    tree = DraftTree(np.array([0, 2], dtype=np.int32), np.array([-1, -1], dtype=np.int32), q=q)
    (decision,) = FAST[name](CPUBackend(), always).decide([row_of(tree)], certain)
    assert decision == Decision((), 1)


@RULES
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -0.5])
def test_a_q_that_is_no_distribution_counts_as_certain_and_is_counted(name: str, value: float) -> None:
    logits = torch.tensor([P, P, P]).log()
    bad = torch.full((2, 8), value)
    for seed in range(20):
        rule = FAST[name](CPUBackend())
        (decision,) = rule.decide([row_of(DraftTree.chain([0, 1], q=bad), seed=seed)], logits)
        (certain,) = FAST[name](CPUBackend()).decide([row_of(DraftTree.chain([0, 1]), seed=seed)], logits)
        assert decision == certain
        assert 1 <= rule.bad_q <= 2


@RULES
@pytest.mark.parametrize("broken", [float("nan"), -float("inf")])
def test_logits_that_allow_no_token_give_none(name: str, broken: float) -> None:
    logits = torch.tensor([P, P, P]).log()
    tree = DraftTree.chain([0, 1], q=torch.tensor([Q, Q]))
    for place, expected in ((0, Decision((), -1)), (1, Decision((0,), -1))):
        damaged = logits.clone()
        damaged[place] = broken
        coins = zeros if place else accept_coins
        assert FAST[name](CPUBackend(), coins).decide([row_of(tree)], damaged) == [expected]


@RULES
def test_coins_of_one_drive_every_rejectable_node_away(name: str) -> None:
    logits = torch.tensor([P, P, P]).log()
    tree = DraftTree.chain([3, 0], q=torch.tensor([Q, Q]))  # p(3) = q(3): accepted by every coin at the root
    (decision,) = FAST[name](CPUBackend(), ones).decide([row_of(tree)], logits)
    assert decision.path in ((0,), (0, 1))


@RULES
def test_a_long_chain_needs_no_deep_stack(name: str) -> None:
    tree = DraftTree.chain([0] * 3000)
    logits = torch.zeros(3001, 4)
    logits[:, 0] = 20
    (decision,) = FAST[name](CPUBackend()).decide([row_of(tree)], logits)
    assert len(decision.path) > 2000


def test_accept_coins_are_the_generators_words() -> None:
    for seed, length, count in ((0, 1, 1), (2**64 - 1, 70_000, 9), (12345, 3, 16)):
        words = philox(seed, np.arange(count), length, 1, length)
        assert accept_coins(seed, length, count).tolist() == (words * 2.0**-32).tolist()
        assert not set(accept_coins(seed, length, count)) & set(accept_coins(seed, length + 1, count))


def emissions(name: str, tree_of: Callable[[np.random.Generator], DraftTree], params: SamplingParams, count: int) -> tuple[Tensor, float]:
    """The law of the first token, float64 [8], and the mean number of accepted nodes, over `count` seeds."""
    random = np.random.default_rng(3)
    rule = CoupledRule(CPUBackend()) if name == "coupled" else FAST[name](CPUBackend())
    counts = torch.zeros(8, dtype=torch.float64)
    accepted = 0
    for begin in range(0, count, 1000):
        trees = [tree_of(random) for _ in range(1000)]
        rows, start = [], 0
        for index, tree in enumerate(trees):
            rows.append(row_of(tree, params, seed=begin + index, index=index, start=start))
            start += len(tree) + 1
        logits = torch.tensor(P).log().repeat(start, 1)
        for tree, decision in zip(trees, rule.decide(rows, logits), strict=True):
            counts[int(tree.tokens[decision.path[0]]) if decision.path else decision.token] += 1
            accepted += len(decision.path)
    return counts / count, accepted / count


def drawn_chain(length: int) -> Callable[[np.random.Generator], DraftTree]:
    q = torch.tensor([Q] * length)
    return lambda random: DraftTree.chain(random.choice(8, size=length, p=Q).tolist(), q=q)


def drawn_siblings(random: np.random.Generator) -> DraftTree:
    q = torch.tensor([Q, Q])
    return DraftTree(random.choice(8, size=2, p=Q).astype(np.int32), np.array([-1, -1], dtype=np.int32), q=q)


@pytest.mark.parametrize("name", ["coupled", "rejection", "traversal"])
@pytest.mark.parametrize(
    ("tree_of", "filters", "rate"),
    [(drawn_chain(1), {}, 0.300), (drawn_chain(3), {}, 0.417), (drawn_siblings, {}, 0.370), (drawn_chain(1), {"top_k": 2}, 0.050)],
    ids=["chain 1", "chain 3", "2 siblings", "top-k 2"],
)
def test_the_law_is_p_with_the_requests_own_coins(
    name: str, tree_of: Callable[[np.random.Generator], DraftTree], filters: dict[str, int], rate: float
) -> None:
    """Sampled in the small; `specdec.testing.prover` proves the same without samples."""
    count = 2000 if filters else 5000
    law, accepted = emissions(name, tree_of, SamplingParams(temperature=1.0, **filters), count)  # type: ignore[arg-type]
    p = torch.tensor(P, dtype=torch.float64)
    if filters:
        p[2:] = 0
        p /= p.sum()
    assert law[p == 0].sum() == 0
    assert float((law - p).abs().sum()) / 2 < 1.6 / count**0.5  # about 4 standard deviations above what p itself would give
    if name == "rejection":
        assert abs(accepted - rate) < 3 / count**0.5
    if name == "traversal":
        assert accepted > rate - 3 / count**0.5
