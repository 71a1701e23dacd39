"""Each compiled kernel against its reference on random input, and the properties that exactness rests on."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.backend.base import AttentionSpec
from specdec.kernels import cpu_ops, reference
from specdec.kernels.build import load_cpu_kernels
from specdec.kernels.filters import filter_logits
from specdec.pack import PackRow, pack
from specdec.tree import DraftTree

PAGE = 4
SPECS = [
    AttentionSpec(4, 2, 16, 0.25),
    AttentionSpec(9, 3, 64, 0.125),
    AttentionSpec(2, 1, 24, 0.2, window=7),
    AttentionSpec(2, 2, 8, 0.3, soft_cap=5.0),
]
TREE = DraftTree.from_paths([[1, 2, 3], [1, 4], [5, 6, 7]])


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no C++ compiler: the references are what runs")


def make_rows(rng: np.random.Generator) -> list[PackRow]:
    pages = rng.permutation(40).astype(np.int32)
    nodes = [9, *TREE.tokens.tolist()]
    return [
        PackRow([1, 2, 3, 4, 5], 13, pages[:5], 1),
        PackRow(nodes, 30, pages[5:15], len(nodes), TREE.parents),
        PackRow([3], 0, pages[15:16], 1),
    ]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_equals_its_reference(spec: AttentionSpec, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    batch = pack(make_rows(np.random.default_rng(0)), PAGE, row_tile=16)
    keys = torch.randn(40, PAGE, spec.num_kv_heads, spec.head_dim).to(dtype)
    values = torch.randn(40, PAGE, spec.num_kv_heads, spec.head_dim).to(dtype)
    q = torch.randn(len(batch.tokens), spec.num_heads, spec.head_dim).to(dtype)
    fast, slow = (ops.paged_attention(q, keys, values, batch, spec) for ops in (cpu_ops, reference))
    assert (fast.float() - slow.float()).abs().max() < tolerance
    assert (fast[int(batch.row_offsets[-1]) :] == 0).all()


@pytest.mark.parametrize("ops", [cpu_ops, reference])
@pytest.mark.parametrize("spec", SPECS)
def test_a_node_has_the_bits_of_a_linear_decode_at_its_place(ops: type[cpu_ops], spec: AttentionSpec) -> None:
    """The same query over the same path: once as a tree node among siblings and other rows, once alone in a linear cache."""
    torch.manual_seed(1)
    keys, values = torch.randn(2, 40, PAGE, spec.num_kv_heads, spec.head_dim)
    rows = make_rows(np.random.default_rng(1))
    batch = pack(rows, PAGE)
    q = torch.randn(len(batch.tokens), spec.num_heads, spec.head_dim)
    together = ops.paged_attention(q, keys, values, batch, spec)
    start = int(batch.row_offsets[1])
    for node in range(len(TREE)):
        path = [30 + 1 + n for n in TREE.path(node)]
        slots = [*range(31), *path]
        linear = torch.arange(-(-len(slots) // PAGE), dtype=torch.int32).numpy()
        flat_keys, flat_values = torch.zeros(2, 40 * PAGE, spec.num_kv_heads, spec.head_dim)
        source = torch.tensor([int(rows[1].pages[slot // PAGE]) * PAGE + slot % PAGE for slot in slots])
        flat_keys[: len(slots)], flat_values[: len(slots)] = keys.flatten(0, 1)[source], values.flatten(0, 1)[source]
        alone = pack([PackRow([0], len(slots) - 1, linear, 1)], PAGE)
        token = start + 1 + node
        single = ops.paged_attention(
            q[token : token + 1], flat_keys.view_as(keys).contiguous(), flat_values.view_as(values).contiguous(), alone, spec
        )
        assert torch.equal(single[0], together[token])


@given(st.integers(0, 2**63 - 1), st.floats(0.1, 3.0), st.integers(1, 40), st.booleans())
@settings(max_examples=50, deadline=None)
def test_choice_equals_its_reference(seed: int, temperature: float, vocabulary: int, greedy: bool) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.randn(5, vocabulary, generator=generator) * 4
    logits[0, 0] = -torch.inf
    seeds = torch.arange(5) + seed - 2**62
    temperatures = torch.full((5,), 0.0 if greedy else temperature)
    arguments = (logits, seeds, torch.arange(5) * 1000, temperatures, 0)
    assert cpu_ops.choose(*arguments).tolist() == reference.choose(*arguments).tolist()


@pytest.mark.parametrize("ops", [cpu_ops, reference])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_logit_or_with_nan_has_no_choice(ops: type[cpu_ops], temperature: float) -> None:
    logits = torch.zeros(3, 6)
    logits[0] = -torch.inf
    logits[1, 3] = torch.nan
    chosen = ops.choose(logits, torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.full((3,), temperature), 0)
    assert chosen[:2].tolist() == [-1, -1]
    assert chosen[2] >= 0


@pytest.mark.parametrize("ops", [cpu_ops, reference])
def test_greedy_ties_go_to_the_lowest_id(ops: type[cpu_ops]) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    assert ops.choose(logits, zero, zero, torch.zeros(1), 0).tolist() == [1]


def test_philox_gives_the_published_vectors() -> None:
    """Known-answer tests of Random123 for philox4x32-10, as far as the counter layout (c3 = 0) can express them."""
    words = [int(reference.philox(0, np.array([lane]), 0, 0)[0]) for lane in range(4)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_the_choice_law_is_p() -> None:
    """10^5 positions of one seed: every frequency within 5 standard deviations of p, and p = 0 never chosen."""
    p = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02, 0.0])
    n = 100_000
    counts = torch.zeros(8)
    for start in range(0, n, 10_000):
        positions = torch.arange(start, start + 10_000)
        logits = p.log().expand(len(positions), 8).contiguous()
        chosen = cpu_ops.choose(logits, torch.full((len(positions),), 7), positions, torch.ones(len(positions)), 0)
        counts += torch.bincount(chosen, minlength=8)
    assert counts[7] == 0
    assert ((counts / n - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-12).all()


def filtered(logits: list[float], **filters: float) -> list[int]:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    row = torch.tensor([logits])
    columns = {name: torch.tensor([value], dtype=torch.int64 if name == "top_k" else torch.float32) for name, value in defaults.items()}
    return filter_logits(row, **columns)[0].isfinite().nonzero().squeeze(1).tolist()


def test_filters_keep_what_they_should() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert filtered(logits, top_k=2) == [0, 1]
    assert filtered(logits, top_p=0.69) == [0, 1]
    assert filtered(logits, top_p=0.71) == [0, 1, 2]
    assert filtered(logits, top_p=0.01) == [0]
    assert filtered(logits, min_p=0.51) == [0, 1]
    assert filtered(logits, min_p=0.49) == [0, 1, 2]
    assert filtered(logits, top_k=3, top_p=0.7) == [0, 1]  # top_p counts what top_k left: 4/9 + 3/9 > 0.7
    assert filtered([1.0, 1.0, 1.0, 0.0], top_k=2) == [0, 1]  # ties by the lowest id
    assert filtered(logits, temperature=0.0, top_k=1) == [0, 1, 2, 3]  # greedy rows are not touched


def test_rows_without_filters_are_not_copied() -> None:
    logits = torch.randn(2, 9)
    off = (torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.zeros(2))
    assert filter_logits(logits, *off) is logits
