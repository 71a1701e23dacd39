"""Pages to the host and back: what was there comes back, elsewhere, and nothing beside it changes."""

from __future__ import annotations

import pytest
import torch

from specdec.backend.cpu import CPUBackend
from specdec.kv_manager.storage import KVStorage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    storage = KVStorage(3, 6, 4, 2, 5, dtype, host_pages=4, backend=CPUBackend())
    storage.keys.copy_(torch.randn(storage.keys.shape, generator=torch.Generator().manual_seed(0)))
    storage.values.copy_(torch.randn(storage.keys.shape, generator=torch.Generator().manual_seed(1)))
    keys, values = storage.keys.clone(), storage.values.clone()
    storage.copy_out([5, 0, 2], [3, 1, 0])
    assert torch.equal(storage.keys, keys), "copying out changes nothing"
    storage.keys.fill_(-1)
    storage.values.fill_(-2)
    storage.copy_in([1, 3], [4, 1])
    for pool, before, filled in ((storage.keys, keys, -1), (storage.values, values, -2)):
        assert torch.equal(pool[:, 4], before[:, 0])
        assert torch.equal(pool[:, 1], before[:, 5])
        assert (pool[:, [0, 2, 3, 5]] == filled).all()
