"""A decoder's whole forward as one call into the compiled kernels, over quantised or bfloat16 weights.

Between two products of a small model lie microseconds of work: as separate operations, each with a parallel region of its own,
they would cost more than the products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.build import load_cpu_kernels
from specdec.kernels.quantized_ops import bfloat16_is_fast
from specdec.pack import PackedBatch
from specdec.quantization.blocks import FORMATS, BlockShape

ACTIVATIONS = ("silu", "gelu_tanh")  # by their number in elementwise.h
HEAD_DIM_MULTIPLE = 8
KINDS = (*FORMATS, "bfloat16")  # of weights, by their number in linear.h


@dataclass(frozen=True)
class LinearTensors:
    """A linear layer.

    Attributes:
        kind: one of KINDS.
        weight: uint8 of the blocks' shape, or bfloat16 [outputs, inputs].
        bias: float32 [outputs] or None.
    """

    outputs: int
    inputs: int
    kind: str
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class LayerTensors:
    """One layer. Norm weights are float32 with any offset added, None where the architecture has no such norm.

    Attributes:
        window: of `AttentionSpec`.
        cos, sin: float32 [positions, head_dim / 2].
    """

    q: LinearTensors
    k: LinearTensors
    v: LinearTensors
    o: LinearTensors
    gate: LinearTensors
    up: LinearTensors
    down: LinearTensors
    input_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out_norm: Tensor | None
    feed_forward_in_norm: Tensor
    feed_forward_out_norm: Tensor | None
    window: int
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class DecoderTensors:
    """All that a forward reads.

    Attributes:
        layers: in order.
        head: the output projection.
        embedding: bfloat16 [vocabulary, hidden]; None where it is the head's quantised weight.
        final_norm: float32 [hidden].
        num_heads, num_kv_heads, head_dim, attention_scale, attention_soft_cap: of `AttentionSpec`.
        activation: one of ACTIVATIONS.
    """

    layers: Sequence[LayerTensors]
    head: LinearTensors
    embedding: Tensor | None
    final_norm: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    attention_scale: float
    attention_soft_cap: float
    logits_soft_cap: float
    embedding_scale: float
    activation: str


class FusedDecoder:
    """Runs a decoder's forwards; the caller's thread leads the others. One forward at a time.

    Args:
        tensors: kept, and read in every forward.
    """

    def __init__(self, tensors: DecoderTensors, library: ctypes.CDLL) -> None:
        self._tensors = tensors
        self._library = library
        self._hidden, self._vocabulary = tensors.head.inputs, tensors.head.outputs
        self._handle = c_void_p(library.specdec_decoder_create(byref(_weights(tensors))))
        self._logits = torch.empty(0)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.specdec_decoder_destroy(self._handle)

    def __call__(self, packed: PackedBatch, keys: Tensor, values: Tensor, capture: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Appends the batch's KV to the pool and computes the logits.

        Args:
            packed: without padding rows.
            keys: bfloat16 or float32 [layers, pages, page_size, num_kv_heads, head_dim].
            values: the same shape, strides and type.
            capture: layers whose output to return.

        Returns:
            float32 [R, vocabulary], which the next forward overwrites, and per captured layer float32 [T, hidden].
        """
        assert keys.dtype == values.dtype and keys.dtype in (torch.float32, torch.bfloat16) and keys.stride() == values.stride()
        rows = len(packed.logit_rows)
        if len(self._logits) < rows:  # kept: fresh pages for it would cost a forward of a small model more than its arithmetic
            self._logits = torch.empty(rows, self._vocabulary)
        wanted = np.array(sorted(set(capture)), dtype=np.int64)
        captured = torch.empty(len(wanted), len(packed.tokens), self._hidden)
        arrays = (getattr(packed, name) for name in _BATCH_ARRAYS)
        call = _ForwardInput(
            *(array.ctypes.data for array in arrays),
            *(len(packed.tokens), len(packed.cached), packed.page_table.shape[1], packed.page_size, rows),
            *(keys.data_ptr(), values.data_ptr(), keys.stride(0)),
            *(wanted.ctypes.data, len(wanted), captured.data_ptr(), self._logits.data_ptr()),
            *(keys.dtype == torch.bfloat16, torch.get_num_threads()),
        )
        self._library.specdec_decoder_forward(self._handle, byref(call))
        return self._logits[:rows], dict(zip(wanted.tolist(), captured, strict=True))


def covers(activation: str, head_dim: int) -> bool:
    """Whether the compiled forward can run such a decoder."""
    return activation in ACTIVATIONS and head_dim % HEAD_DIM_MULTIPLE == 0


def fuse_decoder(tensors: DecoderTensors) -> FusedDecoder | None:
    """The decoder as one call; None where the kernels could not be built or do not cover the architecture or the weights."""
    library = load_cpu_kernels()
    if library is None or not covers(tensors.activation, tensors.head_dim):
        return None
    if tensors.head.kind == "bfloat16" and not bfloat16_is_fast():
        return None
    library.specdec_decoder_create.restype = c_void_p
    return FusedDecoder(tensors, library)


_BATCH_ARRAYS = ("tokens", "positions", "slots", "parents", "depths", "row_offsets", "cached", "page_table", "logit_rows")


class _LinearWeights(Structure):
    """As in linear.h; the other structures are in decoder.h."""

    _fields_ = (("weights", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("kind", c_int64))


_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
_NORMS = ("input_norm", "q_norm", "k_norm", "attention_out_norm", "feed_forward_in_norm", "feed_forward_out_norm")


class _LayerWeights(Structure):
    _fields_ = (
        *((name, _LinearWeights) for name in _LINEARS),
        *((name, c_void_p) for name in _NORMS),
        *(("window", c_int64), ("cos", c_void_p), ("sin", c_void_p)),
    )


class _DecoderWeights(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim")),
        *(("layers", POINTER(_LayerWeights)), ("head", _LinearWeights), ("embedding", c_void_p), ("final_norm", c_void_p)),
        *((name, c_float) for name in ("eps", "attention_scale", "attention_soft_cap", "logits_soft_cap", "embedding_scale")),
        ("activation", c_int32),
    )


class _ForwardInput(Structure):
    _fields_ = (
        *((name, c_void_p) for name in _BATCH_ARRAYS),
        *((name, c_int64) for name in ("num_tokens", "num_rows", "table_width", "page_size", "num_logits")),
        *(("keys", c_void_p), ("values", c_void_p), ("layer_stride", c_int64)),
        *(("capture", c_void_p), ("num_captured", c_int64), ("captured", c_void_p), ("logits", c_void_p)),
        *(("kv_bfloat16", c_int32), ("threads", c_int32)),
    )


def _weights(tensors: DecoderTensors) -> _DecoderWeights:
    layers = (_LayerWeights * len(tensors.layers))(*(_layer(layer) for layer in tensors.layers))
    return _DecoderWeights(
        num_layers=len(tensors.layers),
        hidden=tensors.head.inputs,
        intermediate=tensors.layers[0].gate.outputs,
        layers=layers,
        head=_linear(tensors.head),
        embedding=_address(tensors.embedding, torch.bfloat16),
        final_norm=_address(tensors.final_norm),
        activation=ACTIVATIONS.index(tensors.activation),
        **{name: getattr(tensors, name) for name in ("num_heads", "num_kv_heads", "head_dim", "eps")},
        **{name: getattr(tensors, name) for name in ("attention_scale", "attention_soft_cap", "logits_soft_cap", "embedding_scale")},
    )


def _layer(layer: LayerTensors) -> _LayerWeights:
    return _LayerWeights(
        **{name: _linear(getattr(layer, name)) for name in _LINEARS},
        **{name: _address(getattr(layer, name)) for name in _NORMS},
        window=layer.window,
        cos=_address(layer.cos),
        sin=_address(layer.sin),
    )


def _linear(linear: LinearTensors) -> _LinearWeights:
    outputs, inputs, kind = linear.outputs, linear.inputs, linear.kind
    wide = kind == "bfloat16"
    assert tuple(linear.weight.shape) == ((outputs, inputs) if wide else BlockShape(outputs, inputs, kind).blocks)
    weight = _address(linear.weight, torch.bfloat16 if wide else torch.uint8)
    return _LinearWeights(weight, _address(linear.bias), outputs, inputs, KINDS.index(kind))


def _address(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cpu
    return tensor.data_ptr()
