"""Trees of a draft model: their static shape, what their nodes are drawn from, and what stays in its KV."""

import numpy as np
import pytest
import torch

from specdec.backend.cpu import CPUBackend
from specdec.drafters.base import DraftOutcome
from specdec.drafters.draft_model import DraftModelDrafter, load_draft_model
from specdec.drafters.shape import num_nodes, parse_widths
from specdec.errors import ConfigError
from specdec.models import load_model
from specdec.pack import PackRow
from specdec.request import SamplingParams
from specdec.runner import ModelRunner
from specdec.testing import ScratchKV, make_context, make_row, tiny_prompt, write_const_checkpoint, write_tiny_checkpoint

SAMPLED = SamplingParams(temperature=0.8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return load_model(str(folder), dtype="float32", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def logits_after(tiny):
    """Token ids -> the model's logits, by a forward of its own."""

    def logits(tokens):
        kv = ScratchKV(2, 2, 16, torch.float32, 16, 256)
        return ModelRunner(tiny.model, CPUBackend(), kv).forward([PackRow(tokens, 0, kv.pages("x"), 1)]).logits[0]

    return logits


def weighed_row(tokens, **options):
    return make_row(tokens, wants_q=True, params=SAMPLED, **options)


def test_widths_are_read_and_counted():
    assert parse_widths("4-1-1-1") == (4, 1, 1, 1) and num_nodes((4, 1, 1, 1)) == 16
    assert num_nodes((2, 2, 2)) == 14
    for wrong in ("", "4-", "0-1", "a", "4,1", "16-17", "-".join("1" * 65)):
        with pytest.raises(ConfigError):
            parse_widths(wrong)


def test_options_that_cannot_be_are_refused(tmp_path):
    folder = write_tiny_checkpoint(tmp_path)
    for options in ({"depth": 3, "tree": "2-1"}, {"tree": "0"}, {"depth": 65}):
        with pytest.raises(ConfigError, match="drafter 'model'"):
            load_draft_model(make_context(), str(folder), **options)
    assert load_draft_model(make_context(), str(folder), tree="4-1-1-1").default_limit == 16
    assert load_draft_model(make_context(), str(folder)).default_limit == 4


@pytest.mark.parametrize("wants_q", [False, True])
@pytest.mark.parametrize(
    ("limit", "depth", "parents"),
    [
        (99, 9, [-1, -1, -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8]),
        (99, 2, [-1, -1, -1, 0, 0, 1, 1, 2, 2]),
        (99, 1, [-1, -1, -1]),
        (7, 9, [-1, -1, -1, 0, 0, 1, 1]),
        (10, 9, [-1, -1, -1, 0, 0, 1, 1, 2, 2, 3]),
        (2, 9, [-1, -1]),
    ],
)
def test_the_shape_follows_from_the_limits_alone(tiny, wants_q, limit, depth, parents):
    drafter = DraftModelDrafter(make_context(), tiny, tree="3-2-1")
    rows = [
        make_row(tiny_prompt(5 + n), request_id=str(n), limit=limit, depth=depth, params=SAMPLED, seed=n, wants_q=wants_q) for n in range(3)
    ]
    for tree in drafter.propose(rows):
        tree.validate(512)
        assert tree.parents.tolist() == parents
        assert (tree.q is not None) == wants_q


@pytest.mark.parametrize("length", [1, 16, 33])
def test_each_node_says_what_it_was_drawn_from(tiny, logits_after, length):
    row = weighed_row(tiny_prompt(length), limit=16, seed=3)
    (tree,) = DraftModelDrafter(make_context(), tiny, tree="3-2-1").propose([row])
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        path = tree.tokens[tree.path(parent)].tolist() if parent >= 0 else []
        q = torch.softmax(logits_after([*row.tokens, *path]) / 0.8, dim=-1)
        for sibling in np.flatnonzero(tree.parents[:node] == parent):
            q[int(tree.tokens[sibling])] = 0
        assert torch.allclose(tree.q[node], q / q.sum(), atol=1e-5)
        assert tree.q[node, int(tree.tokens[node])] > 0


def test_q_holds_the_filters_and_fits_the_targets_vocabulary(tmp_path):
    loaded = load_model(str(write_const_checkpoint(tmp_path, [2.0, 1.0, 0.0])), dtype="float32", device=torch.device("cpu"))
    drafter = DraftModelDrafter(make_context(24), loaded, tree="3-1")
    row = make_row([1, 2], limit=9, params=SamplingParams(temperature=1.0, top_k=2), wants_q=True)
    (tree,) = drafter.propose([row])
    tree.validate(24)
    first = torch.softmax(torch.tensor([2.0, 1.0]), dim=-1)
    assert sorted(tree.tokens[:2].tolist()) == [0, 1] and tree.parents.tolist() == [-1, -1, 0, 1]  # two tokens are left to draw
    assert torch.allclose(tree.q[0, :3], torch.tensor([*first, 0.0])) and tree.q[1].max() == 1


def test_draws_are_independent_of_the_targets_noise_of_each_other_and_of_other_steps(tmp_path):
    """A flat model, so that every draw shows its noise."""
    loaded = load_model(str(write_const_checkpoint(tmp_path, [0.0] * 64)), dtype="float32", device=torch.device("cpu"))

    def draw(prompt, seed=1, wants_q=True, name="a"):
        context = make_context(64)
        object.__setattr__(context, "sample", context.sample.named(name))
        row = make_row(prompt, limit=20, params=SamplingParams(temperature=1.0), seed=seed, wants_q=wants_q)
        return DraftModelDrafter(context, loaded, tree="4-1-1-1").propose([row])[0].tokens.tolist()

    base = draw([1, 2])
    assert base == draw([1, 2])
    assert len(set(base[4:8])) > 1  # equal logits under four nodes of one level, and different draws
    assert len(set(draw([1, 2], wants_q=False)[4:8])) == 1  # the target's noise is one per position
    for changed in (draw([1, 2], seed=2), draw([1, 2], name="b"), draw([1, 2, 3]), draw([1, 2], wants_q=False)):
        assert sum(a == b for a, b in zip(base, changed, strict=True)) < 6
    assert draw([1, 2])[4] != draw([1, 2, 3])[0]  # the same position, drafted in another step


def test_coupled_children_are_the_first_of_the_targets_race(tiny):
    row = make_row(tiny_prompt(9), limit=3, params=SAMPLED, seed=11)
    (tree,) = DraftModelDrafter(make_context(), tiny, tree="3").propose([row])
    context = make_context()
    (first,) = DraftModelDrafter(context, tiny, depth=1).propose([row])
    assert tree.tokens[0] == first.tokens[0] and len(set(tree.tokens.tolist())) == 3


def test_greedy_drafting_takes_the_most_probable_tokens_and_says_no_q(tiny, logits_after):
    (tree,) = DraftModelDrafter(make_context(), tiny, tree="3-1", greedy=True).propose([weighed_row(tiny_prompt(9), limit=6)])
    assert tree.tokens[:3].tolist() == logits_after(tiny_prompt(9)).topk(3).indices.tolist()
    assert tree.tokens[3] == logits_after([*tiny_prompt(9), int(tree.tokens[0])]).argmax() and tree.q is None


@pytest.mark.parametrize("branch", range(3))
def test_an_accepted_branch_leaves_the_kv_as_a_fresh_forward_would(tiny, branch):
    drafter = DraftModelDrafter(make_context(), tiny, tree="3-1-1")
    row = make_row(tiny_prompt(20), limit=9)
    (tree,) = drafter.propose([row])
    path = (branch, 3 + branch, 6 + branch)
    emitted = (*tree.tokens[list(path)].tolist(), 7)
    drafter.observe([DraftOutcome("request", tree, path, emitted, {})])
    assert drafter._kv.cached("request") == 20 + (branch == 0)  # only the first node lies where a committed token would
    following = make_row([*row.tokens, *emitted], limit=9)
    fresh = DraftModelDrafter(make_context(), tiny, tree="3-1-1")
    assert drafter.propose([following]) == fresh.propose([following])


def test_rows_with_different_limits_share_the_forwards(tiny):
    rows = [make_row(tiny_prompt(n), request_id=str(n), limit=limit) for n, limit in ((3, 2), (20, 5), (9, 99))]
    trees = DraftModelDrafter(make_context(), tiny, tree="2-2-1").propose(rows)
    alone = [DraftModelDrafter(make_context(), tiny, tree="2-2-1").propose([row])[0] for row in rows]
    assert trees == alone and [len(tree) for tree in trees] == [2, 5, 10]
