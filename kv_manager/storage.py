"""The KV tensors of a pool, and a drafter's view of its own. The only module here that knows torch; keeps no books."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import DrafterError
from specdec.kernels.step_ops import copy_rows
from specdec.kv_manager.manager import KVManager


class HostCopies(Protocol):
    """The part of a backend that swapping needs; see `specdec.backend.base.Backend`."""

    def copy_out(self, pool: Tensor, pages: Sequence[int], host: Tensor, places: Sequence[int]) -> None: ...

    def copy_in(self, host: Tensor, places: Sequence[int], pool: Tensor, pages: Sequence[int]) -> None: ...


class KVStorage:
    """Keys and values of every layer, page and slot, in one allocation.

    Args:
        host_pages: pages that preempted requests may keep in host memory.
        backend: copies them; needed where there are any.

    Attributes:
        keys: [layers, num_pages, page_size, kv_heads, head_dim].
        values: the same shape and strides.

    Zeroed, because an attention kernel may multiply a masked slot by 0 and uninitialised memory may hold NaN.
    """

    def __init__(
        self,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        host_pages: int = 0,
        backend: HostCopies | None = None,
    ) -> None:
        self.page_size = page_size
        self._backend = backend
        if host_pages:  # a page in one piece, unlike in the pool, where a layer is: it is only ever copied as a whole
            self._host = _zeros((host_pages, 2, layers, page_size, kv_heads, head_dim), dtype, torch.device("cpu"))
        self._pages = _zeros((2, layers, num_pages, page_size, kv_heads, head_dim), dtype, torch.device(device))
        self._slots = self._pages.view(2, layers, num_pages * page_size, kv_heads, head_dim)
        self.keys, self.values = self._pages[0], self._pages[1]

    @staticmethod
    def bytes_per_page(layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page, keys and values of all layers."""
        return 2 * layers * page_size * kv_heads * head_dim * dtype.itemsize

    def copy_pages(self, src: list[int], dst: list[int]) -> None:
        """Copies whole pages in all layers; every source is read before any destination is written."""
        copy_rows(self._pages, src, dst)

    def move_slots(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Copies single slots in all layers; every source is read before any destination is written."""
        copy_rows(self._slots, src, dst)

    def copy_out(self, pages: Sequence[int], places: Sequence[int]) -> None:
        """Copies whole pages to places in host memory."""
        assert self._backend is not None
        self._backend.copy_out(self._pages, pages, self._host, places)

    def copy_in(self, places: Sequence[int], pages: Sequence[int]) -> None:
        """Copies places in host memory to whole pages."""
        assert self._backend is not None
        self._backend.copy_in(self._host, places, self._pages, pages)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor; on the host in pages that take no memory until they are written, which torch.zeros writes at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


class DraftStorage:
    """A drafter's KV under the requests' block tables: what `specdec.drafters.base.DraftKV` asks for.

    Args:
        manager: the books; the storage is registered with it.
        name: the drafter's name in the books, unlike that of any other.
        storage: tensors with the manager's number and size of pages.

    Errors are the drafter's (DrafterError), so that a mistaken one costs its drafts and not the engine.
    """

    def __init__(self, manager: KVManager, name: str, storage: KVStorage) -> None:
        pages, size = storage.keys.shape[1], storage.keys.shape[2]
        if (pages, size) != (manager.num_pages, manager.page_size):
            raise DrafterError(f"{name}: its KV must have {manager.num_pages} pages of {manager.page_size} tokens, got {pages} of {size}")
        manager.register(name, storage)
        self._manager = manager
        self._name = name
        self.keys = storage.keys
        self.values = storage.values

    def pages(self, request_id: str) -> NDArray[np.int32]:
        """int32 [p], the request's block table; it covers the committed tokens and this step's draft."""
        self._require(request_id)
        return self._manager.pages(request_id)

    def cached(self, request_id: str) -> int:
        """Leading committed tokens whose KV this drafter has in the pool."""
        self._require(request_id)
        return self._manager.cached(request_id, self._name)

    def set_cached(self, request_id: str, count: int) -> None:
        """States how many leading committed tokens now have this drafter's KV."""
        self._require(request_id)
        self._manager.set_cached(request_id, self._name, count)

    def _require(self, request_id: str) -> None:
        if not self._manager.holds(request_id):
            raise DrafterError(f"{self._name} asks for the KV of request {request_id}, which has none: it has ended or was preempted")
