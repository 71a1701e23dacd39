from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.errors import DrafterError
from specdec.kv_manager import KVManager
from specdec.kv_manager.storage import DraftStorage, KVStorage
from specdec.plan import BatchPlan, Row
from specdec.request import Request, SamplingParams


def make_storage(dtype: torch.dtype = torch.float32) -> KVStorage:
    storage = KVStorage(layers=3, num_pages=6, page_size=4, kv_heads=2, head_dim=5, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for tensor in (storage.keys, storage.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return storage


def test_one_allocation_with_equal_strides():
    storage = make_storage(torch.bfloat16)
    assert storage.keys.shape == storage.values.shape == (3, 6, 4, 2, 5)
    assert storage.keys.stride() == storage.values.stride()
    assert storage.keys.is_contiguous()
    assert storage.keys.untyped_storage().data_ptr() == storage.values.untyped_storage().data_ptr()
    assert storage.keys.untyped_storage().nbytes() == 6 * KVStorage.bytes_per_page(3, 4, 2, 5, torch.bfloat16)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves_and_copies_match_plain_loops(seed, dtype):
    rng = np.random.default_rng(seed)
    storage = make_storage(dtype)
    for unit in ("slots", "pages"):
        size, total = (1, 24) if unit == "slots" else (4, 6)
        src = rng.permutation(total)[: total // 2]
        dst = rng.permutation(total)[: total // 2]  # overlaps with src: everything is read before anything is written
        expected = []
        for tensor in (storage.keys, storage.values):
            before = tensor.clone()
            after = tensor.clone()
            for layer in range(3):
                for a, b in zip(src.tolist(), dst.tolist(), strict=True):
                    for offset in range(size):
                        i, j = a * size + offset, b * size + offset
                        after[layer, j // 4, j % 4] = before[layer, i // 4, i % 4]
            expected.append(after)
        if unit == "slots":
            storage.move_slots(src, dst)
        else:
            storage.copy_pages(src.tolist(), dst.tolist())
        assert torch.equal(storage.keys, expected[0])
        assert torch.equal(storage.values, expected[1])


def test_a_drafters_view_shares_the_tables_and_counts_for_itself():
    kv = KVManager(6, 4)
    view = DraftStorage(kv, "model", make_storage())
    request = Request("a", list(range(9)), 9, SamplingParams(), 0, max_length=20)
    kv.admit(request)
    kv.reserve(BatchPlan((Row(request, 0, 9, 3, 3),)))
    assert view.keys.shape[1:3] == (6, 4)
    assert view.pages("a").tolist() == kv.pages("a").tolist()
    assert view.cached("a") == 0
    view.set_cached("a", 9)
    assert (view.cached("a"), kv.cached("a")) == (9, 0)
    kv.release(request)
    for ask in (view.pages, view.cached, lambda name: view.set_cached(name, 1)):
        with pytest.raises(DrafterError, match="request a"):
            ask("a")


def test_a_drafters_kv_must_have_the_pools_pages():
    with pytest.raises(DrafterError, match="5 pages of 4 tokens, got 6 of 4"):
        DraftStorage(KVManager(5, 4), "model", make_storage())
