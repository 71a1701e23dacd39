"""Each compiled kernel against its reference on random input, and the properties that exactness rests on."""

import numpy as np
import pytest
import torch

from specdec.backend.base import AttentionSpec
from specdec.kernels import cpu_ops, reference
from specdec.kernels.build import load_cpu_kernels
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
