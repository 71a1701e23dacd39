"""Scripted drafters do what their names say."""

import pytest
import torch

from specdec.errors import DrafterError
from specdec.request import SamplingParams
from specdec.testing import Alt, Anti, Empty, OneHot, Oracle, RandomTree, Script, Table, make_context, make_row, self_drafter, table

PROMPT = [1, 2]
REFERENCE = {(1, 2): [10, 11, 12, 13, 14, 15]}


def row(output=(), **options):
    return make_row([*PROMPT, *output], num_prompt=2, **options)


def chain(drafter, *rows):
    trees = drafter.propose(list(rows))
    assert all(tree.is_chain() for tree in trees)
    return [tree.tokens.tolist() for tree in trees]


def test_oracle_is_right_and_stops_at_the_end():
    drafter = Oracle(REFERENCE)
    assert chain(drafter, row(limit=3)) == [[10, 11, 12]]
    assert chain(drafter, row([10, 11, 12, 13], limit=8)) == [[14, 15]]
    assert chain(drafter, row([10, 11, 12, 13, 14, 15]), row([10, 99]), make_row([7])) == [[], [], []]
    assert chain(drafter, row(limit=8, depth=2)) == [[10, 11]]


def test_references_may_be_a_function_of_the_row():
    drafter = Oracle(lambda row: [row.seed] * 3)
    assert chain(drafter, row(seed=4), row(seed=5)) == [[4] * 3, [5] * 3]


def test_anti_is_wrong_and_alt_wrong_from_a_point_on():
    assert chain(Anti(REFERENCE, 16), row(limit=6)) == [[11, 12, 13, 14, 15, 0]]
    assert chain(Alt(REFERENCE, 2, 16), row(limit=4)) == [[10, 11, 13, 14]]


def test_script_counts_the_steps_of_each_request():
    drafter = Script(REFERENCE, [2, 0], 16, limit=3)
    assert chain(drafter, row(limit=3)) == [[10, 11, 13]]
    assert chain(drafter, row(limit=3), row(limit=3, request_id="b")) == [[11, 12, 13], [10, 11, 13]]
    assert chain(drafter, row(limit=3)) == [[11, 12, 13]]
    drafter.forget("request")
    assert chain(drafter, row(limit=3)) == [[10, 11, 13]]


def test_empty_and_one_hot():
    assert chain(Empty(), row()) == [[]]
    assert chain(OneHot(6), row(limit=2)) == [[6, 6]]


def test_random_trees_are_valid_varied_and_repeatable():
    drafter = RandomTree(16)
    rows = [row([token]) for token in range(30)]
    trees = drafter.propose(rows)
    for tree in trees:
        tree.validate(16)
    assert trees == RandomTree(16).propose(rows) != RandomTree(16, seed=1).propose(rows)
    assert any(not tree.is_chain() for tree in trees) and len({tuple(tree.tokens) for tree in trees}) > 20


@pytest.mark.parametrize("independent", [False, True])
def test_table_draws_from_q_and_says_so(independent):
    context = make_context(16)
    q = [0.5, 0.3, 0.2]
    drafter = table(q, limit=2, independent=independent)(context)
    params = SamplingParams(temperature=1.0)
    trees = drafter.propose([row(params=params, seed=seed, limit=1 + seed % 2) for seed in range(2000)])
    counts = torch.bincount(torch.tensor([int(tree.tokens[0]) for tree in trees]), minlength=16)
    assert torch.allclose(counts[:3] / 2000, torch.tensor(q), atol=0.04) and not counts[3:].any()
    assert [len(tree) for tree in trees[:4]] == [1, 2, 1, 2]
    assert torch.equal(trees[0].q, torch.tensor([[*q, *[0.0] * 13]])) and drafter.needs.q


def test_table_children_differ_and_the_second_has_the_rest():
    drafter = Table(make_context(16), [0.5, 0.3, 0.2], width=2)
    (tree,) = drafter.propose([row(params=SamplingParams(temperature=1.0), limit=4)])
    tree.validate(16)
    assert tree.parents.tolist() == [-1, -1, 0, 0]
    assert tree.tokens[0] != tree.tokens[1] and tree.q[1, tree.tokens[0]] == 0
    assert torch.allclose(tree.q.sum(1), torch.ones(4))


def test_self_needs_a_target():
    with pytest.raises(DrafterError, match="needs the target"):
        self_drafter(4)(make_context())
