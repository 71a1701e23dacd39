"""The CPU kernels as functions on tensors: compiled where they could be built, the references elsewhere."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.backend.base import AttentionSpec
from specdec.kernels import reference
from specdec.kernels.build import load_cpu_kernels
from specdec.pack import PackedBatch


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, batch: PackedBatch, spec: AttentionSpec) -> Tensor:
    """See `specdec.kernels.reference.paged_attention`; float32 and bfloat16."""
    library = load_cpu_kernels()
    if library is None:
        return reference.paged_attention(q, keys, values, batch, spec)
    if q.dtype not in (torch.float32, torch.bfloat16) or keys.dtype != q.dtype or values.dtype != q.dtype:
        raise TypeError(f"q, keys and values must all be float32 or bfloat16, got {q.dtype}, {keys.dtype} and {values.dtype}")
    q = q.contiguous()
    out = torch.empty_like(q)
    out[int(batch.row_offsets[-1]) :] = 0
    library.specdec_paged_attention(
        ctypes.c_int(q.dtype == torch.bfloat16),
        *(_tensor(t) for t in (q, keys, values, out)),
        *(_array(a) for a in (batch.parents, batch.depths, batch.row_offsets, batch.cached, batch.page_table)),
        *(ctypes.c_int64(n) for n in (len(batch.cached), batch.page_table.shape[1], batch.page_size)),
        *(ctypes.c_int64(n) for n in (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window)),
        ctypes.c_float(spec.scale),
        ctypes.c_float(spec.soft_cap),
        ctypes.c_int(torch.get_num_threads()),
    )
    return out


def choose(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, stream: int) -> Tensor:
    """See `specdec.kernels.reference.choose`."""
    library = load_cpu_kernels()
    if library is None:
        return reference.choose(logits, seeds, positions, temperature, stream)
    logits = logits.contiguous()
    out = torch.empty(len(logits), dtype=torch.int64)
    library.specdec_choose(
        _tensor(logits),
        ctypes.c_int64(logits.shape[0]),
        ctypes.c_int64(logits.shape[1]),
        *(_tensor(t) for t in (seeds, positions, temperature)),
        ctypes.c_int(stream),
        _tensor(out),
        ctypes.c_int(torch.get_num_threads()),
    )
    return out


def _tensor(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _array(array: NDArray[np.int32]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous and array.dtype == np.int32
    return ctypes.c_void_p(array.ctypes.data)
