"""The CPU kernels as functions on tensors: compiled where they could be built, the references elsewhere."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.backend.base import AttentionSpec, ChoiceBatch
from specdec.kernels import filters, reference
from specdec.kernels.build import load_cpu_kernels
from specdec.pack import PackedBatch


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, batch: PackedBatch, spec: AttentionSpec) -> Tensor:
    """See `specdec.kernels.reference.paged_attention`; float32 and bfloat16."""
    library = load_cpu_kernels()
    if library is None:
        return reference.paged_attention(q, keys, values, batch, spec)
    for name, tensor in (("q", q), ("keys", keys), ("values", values)):
        if tensor.dtype not in (torch.float32, torch.bfloat16) or (tensor is values and values.dtype != keys.dtype):
            raise TypeError(f"{name} must be float32 or bfloat16, and values like keys, got {tensor.dtype}")
    if q.stride()[1:] != (spec.head_dim, 1):
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    out[int(batch.row_offsets[-1]) :] = 0
    library.specdec_paged_attention(
        ctypes.c_void_p(q.data_ptr()),
        *(_tensor(t) for t in (keys, values, out)),
        *(ctypes.c_int(t.dtype == torch.bfloat16) for t in (q, keys)),
        ctypes.c_int64(q.stride(0)),
        *(_array(a) for a in (batch.parents, batch.depths, batch.row_offsets, batch.cached, batch.page_table)),
        *(ctypes.c_int64(n) for n in (len(batch.cached), batch.page_table.shape[1], batch.page_size)),
        *(ctypes.c_int64(n) for n in (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window)),
        ctypes.c_float(spec.scale),
        ctypes.c_float(spec.soft_cap),
        ctypes.c_int(torch.get_num_threads()),
    )
    return out


def choose(logits: Tensor, choice: ChoiceBatch) -> Tensor:
    """See `specdec.kernels.reference.choose`; rows are neither sorted nor copied."""
    library = load_cpu_kernels()
    if library is None:
        return reference.choose(logits, choice)
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    library.specdec_choose(
        *(_column(logits, torch.float32, logits.numel()), ctypes.c_int64(rows), ctypes.c_int64(vocabulary)),
        *(_column(t, torch.int64, rows) for t in (choice.seeds, choice.positions)),
        *_filter_columns(choice.temperature, choice.top_k, choice.top_p, choice.min_p, choice.typical_p, rows),
        ctypes.c_int(choice.stream),
        _column(choice.salts, torch.int64, rows),
        _tensor(out),
        ctypes.c_int(torch.get_num_threads()),
    )
    return out


def filter_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor | None = None
) -> Tensor:
    """See `specdec.kernels.filters.filter_logits`; the vocabulary is not sorted. Float64 rows take the plain way."""
    library = load_cpu_kernels() if logits.dtype == torch.float32 else None
    if library is None or not filters.active_rows(temperature, top_k, top_p, min_p, typical_p).any():
        return filters.filter_logits(logits, temperature, top_k, top_p, min_p, typical_p)
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    out = torch.empty_like(logits)
    library.specdec_filter(
        *(_column(logits, torch.float32, logits.numel()), ctypes.c_int64(rows), ctypes.c_int64(vocabulary)),
        *_filter_columns(temperature, top_k, top_p, min_p, typical_p, rows),
        _tensor(out),
        ctypes.c_int(torch.get_num_threads()),
    )
    return out


def log_sum_exp(logits: Tensor, temperature: Tensor) -> Tensor:
    """See `specdec.kernels.reference.log_sum_exp`."""
    library = load_cpu_kernels() if logits.is_cpu and logits.dtype == torch.float32 else None
    if library is None:
        return reference.log_sum_exp(logits, temperature)
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.float64)
    library.specdec_log_sum_exp(
        *(_column(logits, torch.float32, logits.numel()), ctypes.c_int64(rows), ctypes.c_int64(vocabulary)),
        *(_column(temperature, torch.float32, rows), _tensor(out)),
        ctypes.c_int(torch.get_num_threads()),
    )
    return out


def _filter_columns(
    temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor | None, rows: int
) -> list[ctypes.c_void_p]:
    columns = ((temperature, torch.float32), (top_k, torch.int64), (top_p, torch.float32), (min_p, torch.float32))
    return [*(_column(column, dtype, rows) for column, dtype in columns), _column(typical_p, torch.float32, rows)]


def _column(tensor: Tensor | None, dtype: torch.dtype, count: int) -> ctypes.c_void_p:
    """The address of a contiguous tensor of `count` elements, null for None: C++ checks neither type nor size."""
    if tensor is None:
        return ctypes.c_void_p(0)
    if tensor.dtype != dtype or tensor.numel() != count:
        raise TypeError(f"expected {count} elements of {dtype}, got {tensor.numel()} of {tensor.dtype}")
    return _tensor(tensor)


def _tensor(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _array(array: NDArray[np.int32]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous and array.dtype == np.int32
    return ctypes.c_void_p(array.ctypes.data)
