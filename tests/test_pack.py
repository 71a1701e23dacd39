import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import pack as reference
from specdec.kernels.build import load_cpu_kernels
from specdec.kernels.pack_ops import pack
from specdec.pack import PackRow
from specdec.tree import DraftTree
from tests.test_tree import trees

PAGE = 4


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_built() -> None:
    load_cpu_kernels()  # before hypothesis looks at the time


@st.composite
def pack_rows(draw: st.DrawFn) -> list[PackRow]:
    rows = []
    for index in range(draw(st.integers(1, 4))):
        tree: DraftTree = draw(trees(max_nodes=6))
        pending, cached = draw(st.integers(1, 6)), draw(st.integers(0, 9))
        length = pending + len(tree)
        pages = np.arange(-(-(cached + length) // PAGE), dtype=np.int32) + 10 * index
        tokens = [*range(pending), *tree.tokens.tolist()]
        rows.append(PackRow(tokens, cached, pages, draw(st.integers(0, length)), tree.parents if len(tree) else None))
    return rows


@given(pack_rows(), st.sampled_from([1, 4, 16]))
def test_packing_places_every_token_on_its_own_path(rows: list[PackRow], tile: int) -> None:
    batch = pack(rows, PAGE, tile)
    total = sum(len(row.tokens) for row in rows)
    assert len(batch.tokens) % tile == 0 and total <= len(batch.tokens) < total + tile
    assert (batch.slots[total:] == -1).all()
    wanted_logits = []
    for index, row in enumerate(rows):
        start, end = batch.row_offsets[index], batch.row_offsets[index + 1]
        assert batch.tokens[start:end].tolist() == list(row.tokens)
        nodes = 0 if row.parents is None else len(row.parents)
        pending = len(row.tokens) - nodes
        for local in range(end - start):
            ancestors = []  # from the packed parents, from the token up
            token = local
            while token >= 0:
                ancestors.append(token)
                token = int(batch.parents[start + token])
            assert batch.depths[start + local] == len(ancestors) - 1
            assert batch.positions[start + local] == row.cached + len(ancestors) - 1
            expected = [local] if local >= pending else []
            while expected and expected[-1] >= pending:
                assert row.parents is not None
                expected.append(pending + int(row.parents[expected[-1] - pending]))
            assert ancestors[: len(expected)] == expected  # node parents, the last pending token being the root
            logical = row.cached + local
            assert batch.slots[start + local] == row.pages[logical // PAGE] * PAGE + logical % PAGE
        wanted_logits += list(range(end - row.num_logits, end))
    assert batch.logit_rows.tolist() == wanted_logits


@given(st.lists(pack_rows(), max_size=2), st.sampled_from([1, 16]))
def test_packing_equals_its_reference(batches: list[list[PackRow]], tile: int) -> None:
    rows = [row for batch in batches for row in batch]
    packed, expected = pack(rows, PAGE, tile), reference.pack(rows, PAGE, tile)
    for name, array in vars(expected).items():
        assert np.array_equal(getattr(packed, name), array), name
        if isinstance(array, np.ndarray):
            own = getattr(packed, name)
            assert (own.dtype, own.shape, own.flags.c_contiguous) == (array.dtype, array.shape, True), name


def test_a_row_with_too_few_pages_is_refused() -> None:
    with pytest.raises(IndexError):
        pack([PackRow([1, 2], PAGE - 1, np.zeros(1, dtype=np.int32), 1)], PAGE)


def test_depth_equals_index_exactly_where_all_earlier_tokens_are_ancestors() -> None:
    tree = DraftTree.from_paths([[1, 2], [3]])
    batch = pack([PackRow([0, 0, 1, 2, 3], 0, np.arange(2, dtype=np.int32), 1, tree.parents)], PAGE)
    assert batch.depths.tolist() == [0, 1, 2, 3, 2]
