"""The Triton kernels against their references, in Triton's interpreter. Run by test_triton.py, with TRITON_INTERPRET=1."""

import numpy as np
import pytest
import torch

from specdec.backend.base import ChoiceBatch
from specdec.kernels import reference
from specdec.kernels.triton.kv_commit import kv_commit
from specdec.kernels.triton.residual import Draws, Rejected, residual
from specdec.kernels.triton.row_choice import choose
from specdec.kernels.triton.tree_walk import tree_walk
from specdec.tree import DraftTree

FILTERS = [
    {},
    {"top_k": 3},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.01},
    {"top_p": 0.95, "typical_p": 0.5},
]


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
@pytest.mark.parametrize(("vocabulary", "dtype"), [(5, torch.float32), (150, torch.bfloat16)])
def test_row_choice(parameters: dict[str, float], vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    rows = 6
    logits = (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype)
    logits[1, torch.rand(vocabulary, generator=generator) < 0.7] = -torch.inf
    logits[1, vocabulary // 2] = 0
    logits[2] = logits[2].round()
    logits[4, 3] = torch.nan
    logits[5] = -torch.inf
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    columns = {
        name: torch.full((rows,), parameters.get(name, value), dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in defaults.items()
    }
    for temperature in ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.5, 1.0, 4.0, 1.0, 1.0]):
        batch = ChoiceBatch(
            seeds=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
            positions=torch.arange(rows) * 1000,
            temperature=torch.tensor(temperature),
            stream=3,
            salts=torch.arange(rows) * 7,
            **columns,
        )
        assert choose(logits, batch, block=64).tolist() == reference.choose(logits.float(), batch).tolist()


def random_tree(rng: np.random.Generator, nodes: int, vocabulary: int) -> DraftTree:
    parents = np.array([rng.integers(-1, node) if node else -1 for node in range(nodes)], dtype=np.int32)
    return DraftTree(rng.integers(0, vocabulary, nodes).astype(np.int32), parents)


@pytest.mark.parametrize("seed", range(8))
def test_tree_walk(seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size = 4
    trees = [random_tree(rng, int(nodes), 3) for nodes in rng.integers(0, 12, 5)]
    offsets = np.cumsum([0, *map(len, trees)]).astype(np.int32)
    chosen = [rng.integers(0, 3, len(tree) + 1) for tree in trees]
    bases = rng.integers(0, 9, len(trees)).astype(np.int32)
    table = rng.permutation(30).reshape(5, 6).astype(np.int32)
    walked = tree_walk(
        torch.from_numpy(np.concatenate([tree.tokens for tree in trees])),
        torch.from_numpy(np.concatenate([tree.parents for tree in trees])),
        torch.from_numpy(offsets),
        torch.from_numpy(np.concatenate(chosen)),
        torch.from_numpy(bases),
        torch.from_numpy(table),
        page_size,
    )
    for row, tree in enumerate(trees):
        path, token = tree.walk(chosen[row].tolist())
        count = int(walked.counts[row])
        assert walked.nodes[row, :count].tolist() == path
        assert (walked.nodes[row, count:] == -1).all()
        assert int(walked.next_tokens[row]) == token
        for place, node in enumerate(path):
            slots = [int(table[row, at // page_size]) * page_size + at % page_size for at in (bases[row] + node, bases[row] + place)]
            expected = [-1, -1] if node == place else slots
            assert [int(walked.src[row, place]), int(walked.dst[row, place])] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_commit_reads_before_it_writes(dtype: torch.dtype) -> None:
    pool = torch.randn(2, 3, 40, 2, 24).to(dtype)
    src = torch.tensor([[-1, 12, 13, 15, -1], [31, 33, -1, -1, -1], [-1, -1, -1, -1, -1]])
    dst = torch.tensor([[-1, 11, 12, 13, -1], [30, 31, -1, -1, -1], [-1, -1, -1, -1, -1]])
    expected = pool.clone()
    moved = src >= 0
    expected[:, :, dst[moved]] = pool[:, :, src[moved]]
    kv_commit(pool, src, dst, block=32)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("seed", range(3))
def test_residual(seed: int) -> None:
    """Sampled and certain children in any mixture, with masses as traversal has them."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    count, vocabulary, most = 4, 100, 3
    logits = torch.randn(7, vocabulary, generator=generator) * 2
    logits[:, 90:] = -torch.inf
    q = torch.softmax(torch.randn(5, vocabulary, generator=generator) * 2, -1)
    rows = torch.tensor([6, 0, 3, 1], dtype=torch.int32)
    temperature = torch.tensor([1.0, 0.7, 1.5, 1.0])
    tokens, q_rows = rng.integers(0, 90, (count, most)), rng.integers(-1, 5, (count, most))
    masses, totals = rng.uniform(0.5, 1, (count, most)), np.ones((count, most))
    counts = np.array([0, 1, 2, 3])
    scaled = logits[rows.long()].double() / temperature[:, None].double()
    remains = torch.softmax(scaled, -1)
    for draw in range(count):
        for child in range(counts[draw]):
            q_row = q_rows[draw, child]
            proposal = q[q_row].double() if q_row >= 0 else torch.eye(vocabulary, dtype=torch.float64)[tokens[draw, child]]
            rest = (remains[draw] * masses[draw, child] - proposal).clamp(min=0)
            totals[draw, child] = float(rest.sum())
            last = child + 1 == counts[draw]
            remains[draw] = rest if last else rest / totals[draw, child]
    seeds, positions, salts = torch.arange(count) - 2, torch.arange(count) * 50, torch.arange(count)
    draws = Draws(rows, temperature, scaled.logsumexp(-1), seeds, positions, salts)
    rejected = Rejected(
        torch.from_numpy(counts.astype(np.int32)),
        torch.from_numpy(tokens.astype(np.int32)),
        torch.from_numpy(q_rows.astype(np.int32)),
        torch.from_numpy(masses),
        torch.from_numpy(totals),
    )
    sums, drawn = residual(logits, q, draws, rejected, block=64)
    assert torch.allclose(sums, remains.sum(-1), rtol=1e-9)
    for draw in range(count):
        possible = np.flatnonzero(remains[draw].numpy() > 0)
        noise = reference.gumbel(reference.philox(int(seeds[draw]) % 2**64, possible, int(positions[draw]), 2, int(salts[draw])))
        assert int(drawn[draw]) == possible[np.argmax(np.log(remains[draw].numpy()[possible]) + noise)]


def test_an_empty_residual_draws_nothing() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf]])
    one = torch.zeros(1, dtype=torch.int64)
    draws = Draws(one.int(), torch.ones(1), torch.zeros(1, dtype=torch.float64), one, one, one)
    ones = torch.ones(1, 1, dtype=torch.float64)
    rejected = Rejected(torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), -1).int(), ones, ones)
    sums, drawn = residual(logits, torch.empty(0, 5), draws, rejected, block=16)
    assert sums.tolist() == [0.0]
    assert drawn.tolist() == [-1]
