"""The kernels of a step's host side against their references on random input."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.backend.base import ChoiceBatch, TreeBatch
from specdec.kernels import step_ops, step_reference
from specdec.kernels.build import load_cpu_kernels
from specdec.tree import DraftTree
from tests.test_tree import trees

VOCABULARY = 5


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no C++ compiler: the references are what runs")


def tree_batch(drafts: list[DraftTree], temperature: list[float], seed: int, typical: bool = False) -> tuple[torch.Tensor, TreeBatch]:
    """Random logits of requests with these drafts, rows of others between them, and how they choose."""
    generator = torch.Generator().manual_seed(seed)
    sizes = np.array([len(tree) for tree in drafts])
    starts = np.cumsum(sizes + 2) - (sizes + 2) + 1  # one row of another's before each root
    logits = torch.randn(int((sizes + 2).sum()), VOCABULARY, generator=generator) * 2
    count = len(drafts)
    choice = ChoiceBatch(
        seeds=torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        positions=torch.randint(0, 1000, (count,), generator=generator),
        temperature=torch.tensor(temperature),
        top_k=torch.randint(0, 3, (count,), generator=generator),
        top_p=torch.full((count,), 0.9),
        min_p=torch.zeros(count),
        typical_p=torch.full((count,), 0.8) if typical else None,
    )
    tokens, parents = (np.concatenate([getattr(tree, name) for tree in drafts]) for name in ("tokens", "parents"))
    return logits, TreeBatch(tokens, parents, np.cumsum([0, *sizes]), starts, choice)


@given(st.lists(trees(vocabulary=VOCABULARY), min_size=1, max_size=6), st.integers(0, 2**31), st.booleans(), st.sampled_from([1, 2, 5]))
@settings(max_examples=80, deadline=None)
def test_the_walk_equals_its_reference(drafts: list[DraftTree], seed: int, typical: bool, threads: int) -> None:
    logits, batch = tree_batch(drafts, [(0.0, 0.7, 1.5)[(seed + i) % 3] for i in range(len(drafts))], seed, typical)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        walked = step_ops.walk(logits, batch)
    finally:
        torch.set_num_threads(before)
    expected = step_reference.walk(logits, batch)
    for name in ("nodes", "counts", "next_tokens"):
        assert getattr(walked, name).tolist() == getattr(expected, name).tolist(), name


@pytest.mark.parametrize("walk", [step_ops.walk, step_reference.walk])
def test_a_walk_ends_where_no_token_can_be_chosen(walk) -> None:
    logits, batch = tree_batch([DraftTree.chain([1, 2]), DraftTree.chain([1])], [0.0, 0.0], 0)
    logits[1] = torch.tensor([0.0, 9, 0, 0, 0])
    logits[2, 3] = torch.nan  # after the first node of the first request
    logits[5] = -torch.inf  # at the root of the second
    walked = walk(logits, batch)
    assert walked.nodes[:, :1].tolist() == [[0], [-1]]
    assert walked.counts.tolist() == [1, 0] and walked.next_tokens.tolist() == [-1, -1]


def test_arrays_of_the_wrong_type_are_refused() -> None:
    logits, batch = tree_batch([DraftTree.chain([1])], [0.0], 0)
    with pytest.raises(TypeError, match="expected a contiguous array of int32, got int64"):
        step_ops.walk(logits, dataclasses.replace(batch, tokens=batch.tokens.astype(np.int64)))
    with pytest.raises(TypeError, match=r"expected 1 elements of torch\.float32, got 1 of torch\.float64"):
        step_ops.walk(logits, dataclasses.replace(batch, choice=dataclasses.replace(batch.choice, top_p=torch.ones(1).double())))
    with pytest.raises(TypeError, match="float16"):
        step_ops.walk(logits.half(), batch)


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 12), st.sampled_from([3, 200]))
@settings(max_examples=40, deadline=None)
def test_copies_equal_their_reference(seed: int, dtype: torch.dtype, count: int, width: int) -> None:
    """Sources and destinations overlap at will, and may be many enough for several threads."""
    rng = np.random.default_rng(seed)
    pool = torch.from_numpy(rng.standard_normal((2, 4, 20, width, 7)).astype(np.float32)).to(dtype)
    src, dst = rng.integers(0, 20, count), rng.permutation(20)[:count]
    expected = pool.clone()
    step_reference.copy_rows(expected, src, dst)
    step_ops.copy_rows(pool, src.tolist(), dst)
    assert torch.equal(pool, expected)


def test_rows_outside_the_pool_are_refused() -> None:
    pool = torch.zeros(2, 1, 4, 3)
    with pytest.raises(IndexError, match=r"rows must lie in \[0, 4\), got 0 to 4"):
        step_ops.copy_rows(pool, [0, 4], [1, 2])
    with pytest.raises(ValueError, match="got 1 and 2"):
        step_ops.copy_rows(pool, [0], [1, 2])
