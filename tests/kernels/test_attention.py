"""The compiled attention kernel against its reference on random input, and the equalities of bits that exactness rests on."""

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.backend.base import AttentionSpec
from specdec.kernels import cpu_ops, reference
from specdec.kernels.build import load_cpu_kernels
from specdec.pack import PackedBatch, PackRow, pack
from specdec.tree import DraftTree

SLOTS = 480
SPECS = [
    AttentionSpec(4, 4, 16, 0.25),
    AttentionSpec(9, 3, 64, 0.125),
    AttentionSpec(12, 2, 128, 0.09),
    AttentionSpec(14, 2, 64, 0.125, window=40),
    AttentionSpec(4, 1, 256, 0.0625, window=96),
    AttentionSpec(2, 1, 24, 0.2, window=7),
    AttentionSpec(2, 2, 40, 0.3, soft_cap=5.0),
    AttentionSpec(40, 1, 8, 0.3),
]
TREE = DraftTree.from_paths([[1, 2, 3, 4, 5], [1, 6, 7, 8], [9, 10, 11], [1, 2, 12], [9, 13]])
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no C++ compiler: the references are what runs")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_rows(rng: np.random.Generator, page_size: int) -> list[PackRow]:
    """A prefill chunk in mid-sequence, a tree that crosses a block of keys, one at a block's start, a chain and a first token."""
    pages = rng.permutation(SLOTS // page_size).astype(np.int32)
    nodes = [9, *TREE.tokens.tolist()]
    shapes = [([1] * 75, 51, 1, None), (nodes, 60, len(nodes), TREE.parents), ([7, *nodes], 30, len(nodes), TREE.parents)]
    shapes += [([1, 2, 3], 94, 3, np.array([-1, 0], dtype=np.int32)), ([3], 0, 1, None)]
    rows, start = [], 0
    for tokens, cached, logits, parents in shapes:
        end = start - (-(cached + len(tokens)) // page_size)
        rows.append(PackRow(tokens, cached, pages[start:end], logits, parents))
        start = end
    return rows


def make_inputs(spec: AttentionSpec, batch: PackedBatch, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, keys and values; slots that no row uses hold NaN, which must reach no output."""
    torch.manual_seed(0)
    q = torch.randn(len(batch.tokens), spec.num_heads, spec.head_dim).to(q_dtype)
    keys, values = torch.randn(2, SLOTS // batch.page_size, batch.page_size, spec.num_kv_heads, spec.head_dim).to(kv_dtype)
    unused = torch.ones(SLOTS, dtype=torch.bool)
    for row, cached in enumerate(batch.cached):
        slots = np.arange(cached + batch.row_offsets[row + 1] - batch.row_offsets[row])
        unused[batch.page_table[row][slots // batch.page_size] * batch.page_size + slots % batch.page_size] = False
    keys.flatten(0, 1)[unused] = torch.nan
    values.flatten(0, 1)[unused] = torch.nan
    return q, keys, values


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("q_dtype", DTYPES)
def test_equals_the_reference(page_size: int, spec: AttentionSpec, kv_dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    batch = pack(make_rows(np.random.default_rng(0), page_size), page_size, row_tile=16)
    q, keys, values = make_inputs(spec, batch, q_dtype, kv_dtype)
    fast, slow = (ops.paged_attention(q, keys, values, batch, spec) for ops in (cpu_ops, reference))
    assert fast.dtype == q_dtype
    assert (fast.float() - slow.float()).abs().max() < (1e-5 if q_dtype == kv_dtype == torch.float32 else 2e-2)
    assert (fast[int(batch.row_offsets[-1]) :] == 0).all()


def test_a_bfloat16_cache_costs_little_precision() -> None:
    """Rounding queries and weights to bfloat16 is an error like that of rounding the cache: below 1 % of the output."""
    spec = AttentionSpec(12, 2, 128, 128**-0.5)
    batch = pack([PackRow([0] * 40, 400, np.arange(SLOTS // 16, dtype=np.int32), 1)], 16)
    q, keys, values = make_inputs(spec, batch, torch.float32, torch.bfloat16)
    fast, slow = (ops.paged_attention(q, keys, values, batch, spec) for ops in (cpu_ops, reference))
    assert (fast - slow).norm() < 0.01 * slow.norm()


def test_q_may_be_a_slice_of_wider_rows() -> None:
    spec = AttentionSpec(9, 3, 64, 0.125)
    batch = pack(make_rows(np.random.default_rng(0), 16), 16)
    q, keys, values = make_inputs(spec, batch, torch.float32, torch.float32)
    fused = torch.cat([torch.full_like(q, torch.nan), q, torch.full_like(q, torch.nan)], dim=1)
    whole, sliced = (cpu_ops.paged_attention(x, keys, values, batch, spec) for x in (q, fused[:, 9:18]))
    assert torch.equal(whole, sliced)


def path_slots(batch: PackedBatch, row: int, local: int) -> Tensor:
    """int64 [length]: flat slots of a token's path in position order."""
    path: list[int] = []
    while local >= 0:
        path.insert(0, local)
        local = int(batch.parents[int(batch.row_offsets[row]) + local])
    logical = np.concatenate([np.arange(batch.cached[row]), batch.cached[row] + np.array(path)])
    return torch.from_numpy(batch.page_table[row][logical // batch.page_size] * batch.page_size + logical % batch.page_size)


@pytest.mark.parametrize("ops", [cpu_ops, reference])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_every_token_has_the_bits_of_a_linear_decode_at_its_place(ops: ModuleType, spec: AttentionSpec, kv_dtype: torch.dtype) -> None:
    """The same query over the same path: in a chunk or tree among other rows, and alone in a linear cache of other pages."""
    batch = pack(make_rows(np.random.default_rng(1), 3), 3)
    q, keys, values = make_inputs(spec, batch, torch.float32, kv_dtype)
    together = ops.paged_attention(q, keys, values, batch, spec)
    for row in range(len(batch.cached)):
        start, end = batch.row_offsets[row : row + 2].tolist()
        for token in range(start, end):
            source = path_slots(batch, row, token - start)
            linear = torch.full((2, SLOTS, spec.num_kv_heads, spec.head_dim), torch.nan, dtype=kv_dtype)
            linear[0, : len(source)], linear[1, : len(source)] = keys.flatten(0, 1)[source], values.flatten(0, 1)[source]
            alone = pack([PackRow([0], len(source) - 1, np.arange(SLOTS // 16, dtype=np.int32), 1)], 16)
            single = ops.paged_attention(q[token : token + 1], *linear.unflatten(1, (-1, 16)), alone, spec)
            assert torch.equal(single[0], together[token])


@pytest.mark.parametrize("spec", SPECS)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(spec: AttentionSpec) -> None:
    pages = np.arange(SLOTS // 16, dtype=np.int32)
    whole = pack([PackRow([0] * 200, 0, pages, 1)], 16)
    q, keys, values = make_inputs(spec, whole, torch.bfloat16, torch.bfloat16)
    expected = cpu_ops.paged_attention(q, keys, values, whole, spec)
    for chunk in (1, 7, 64):
        for start in range(0, 200, chunk):
            end = min(start + chunk, 200)
            part = pack([PackRow([0] * (end - start), start, pages, 1)], 16)
            assert torch.equal(cpu_ops.paged_attention(q[start:end], keys, values, part, spec), expected[start:end])


@pytest.mark.parametrize("spec", SPECS)
def test_bits_do_not_depend_on_threads(spec: AttentionSpec, threads: None) -> None:
    """Units are cut by the number of threads: more of them than cores changes the cut all the same."""
    batch = pack(make_rows(np.random.default_rng(2), 16), 16)
    q, keys, values = make_inputs(spec, batch, torch.float32, torch.bfloat16)
    results = []
    for count in (1, 2, 64):
        torch.set_num_threads(count)
        results.append(cpu_ops.paged_attention(q, keys, values, batch, spec))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_what_a_token_does_not_see_leaks_nothing(bad: float, kv_dtype: torch.dtype) -> None:
    """A later token of a chunk, a sibling and a key outside the window: their blocks are shared, their values are not."""
    spec = AttentionSpec(6, 2, 64, 0.125, window=20)
    batch = pack([PackRow([0] * (21 + len(TREE)), 40, np.arange(SLOTS // 16, dtype=np.int32), 1, TREE.parents)], 16)
    q, keys, values = make_inputs(spec, batch, torch.float32, kv_dtype)
    expected = cpu_ops.paged_attention(q, keys, values, batch, spec)
    for slot in range(33, 70):
        broken_keys, broken_values = keys.clone(), values.clone()
        broken_keys.flatten(0, 1)[slot] = bad
        broken_values.flatten(0, 1)[slot] = bad
        result = cpu_ops.paged_attention(q, broken_keys, broken_values, batch, spec)
        blind = [token for token in range(len(q)) if slot not in path_slots(batch, 0, token)[-spec.window :]]
        assert 0 < len(blind) < len(q)
        assert torch.equal(result[blind], expected[blind])
