"""The CPU kernels of a step's host side: compiled where they could be built, the references elsewhere."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.backend.base import TreeBatch, Walked
from specdec.kernels import step_reference
from specdec.kernels.build import load_cpu_kernels

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "specdec_walk": (None, (_pointer, _long, _long, *[_pointer] * 11, _long, *[_pointer] * 3, _int)),
    "specdec_pack": (None, (_long, *[_pointer] * 3, _int, _pointer, _long, *[_pointer] * 2, _long, _pointer)),
    "specdec_copy_rows": (None, (_pointer, _long, _long, _long, _pointer, _pointer, _long, _int)),
    "specdec_ngram_new": (_pointer, (_int, _int)),
    "specdec_ngram_free": (None, (_pointer,)),
    "specdec_ngram_propose": (None, (_pointer, _long, _pointer, _long, *[_pointer] * 4)),
    "specdec_choose_depths": (ctypes.c_double, (_pointer, _pointer)),
    "specdec_choose_nodes": (None, (_pointer,) * 5),
    "specdec_follow_widths": (ctypes.c_int, (_pointer, _pointer, _long, *[_pointer] * 3)),
    "specdec_learn_drafts": (_long, (_long, *[_pointer] * 4, _long, *[_pointer] * 3, _long, _pointer, _pointer)),
}


@functools.cache
def compiled(name: str) -> Callable[..., Any]:  # what the kernel gives back
    """A compiled kernel that takes plain numbers and addresses. Ask only where `load_cpu_kernels` has some."""
    library = load_cpu_kernels()
    assert library is not None
    function = library[name]
    function.restype, function.argtypes = _SIGNATURES[name]
    return function


def walk(logits: Tensor, trees: TreeBatch) -> Walked:
    """See `specdec.kernels.step_reference.walk`; at nodes that cannot be reached nothing is chosen."""
    if load_cpu_kernels() is None:
        return step_reference.walk(logits, trees)
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}")
    logits = logits.contiguous()
    requests, choice = len(trees.starts), trees.choice
    deepest = int((trees.offsets[1:] - trees.offsets[:-1]).max()) if requests else 0
    walked = Walked(np.full((requests, deepest), -1, np.int32), np.empty(requests, np.int32), np.empty(requests, np.int32))
    compiled("specdec_walk")(
        logits.data_ptr(),
        logits.shape[1],
        requests,
        *(address(trees.starts, np.int64), address(trees.tokens, np.int32)),
        *(address(trees.parents, np.int32), address(trees.offsets, np.int64)),
        *(_column(column, torch.int64, requests) for column in (choice.seeds, choice.positions)),
        *(_column(choice.temperature, torch.float32, requests), _column(choice.top_k, torch.int64, requests)),
        *(_column(column, torch.float32, requests) for column in (choice.top_p, choice.min_p, choice.typical_p)),
        deepest,
        *(address(array, np.int32) for array in (walked.nodes, walked.counts, walked.next_tokens)),
        torch.get_num_threads(),
    )
    return walked


def copy_rows(pool: Tensor, src: Sequence[int] | NDArray[np.int64], dst: Sequence[int] | NDArray[np.int64]) -> None:
    """See `specdec.kernels.step_reference.copy_rows`; a pool on another device takes the plain way."""
    source, target = (np.ascontiguousarray(rows, dtype=np.int64) for rows in (src, dst))
    if not pool.is_cpu or load_cpu_kernels() is None:
        step_reference.copy_rows(pool, source, target)
        return
    rows = pool.shape[2]
    if len(source) != len(target):
        raise ValueError(f"as many rows must be read as written, got {len(source)} and {len(target)}")
    for places in (source, target):
        if len(places) and not 0 <= places.min() <= places.max() < rows:
            raise IndexError(f"rows must lie in [0, {rows}), got {places.min()} to {places.max()}")
    assert pool.is_contiguous()
    planes = pool.shape[0] * pool.shape[1]
    compiled("specdec_copy_rows")(
        *(pool.data_ptr(), planes, rows, pool.nbytes // (planes * rows)),
        *(address(source, np.int64), address(target, np.int64), len(source)),
        torch.get_num_threads(),
    )


def address(array: NDArray[Any], dtype: type[np.generic]) -> int:  # of any dtype, to be refused
    """Where a contiguous array of `dtype` lies; C++ checks neither."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(f"expected a contiguous array of {dtype.__name__}, got {array.dtype}")
    if array.size and array.flags.writeable:  # half the time of the attribute below, and a step asks for twenty
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    place: int = array.ctypes.data
    return place


def _column(tensor: Tensor | None, dtype: torch.dtype, count: int) -> int | None:
    """Where a contiguous tensor of `count` elements lies, None for None."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or tensor.numel() != count or not tensor.is_contiguous():
        raise TypeError(f"expected {count} elements of {dtype}, got {tensor.numel()} of {tensor.dtype}")
    return tensor.data_ptr()
