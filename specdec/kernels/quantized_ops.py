"""The product of quantised weights as a function on tensors: compiled where it could be built, the reference elsewhere."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from specdec.kernels.build import load_cpu_kernels
from specdec.quantization.blocks import FORMATS, BlockShape
from specdec.quantization.reference import linear_reference


def quantized_is_fast() -> bool:
    """Whether the compiled kernels are there and this processor multiplies bytes by an instruction made for it."""
    library = load_cpu_kernels()
    return library is not None and bool(library.specdec_quantized_is_fast())


def bfloat16_is_fast() -> bool:
    """Whether decoders with bfloat16 weights run in one call: with compiled kernels and AVX512_BF16."""
    library = load_cpu_kernels()
    return library is not None and bool(library.specdec_decoder_takes_bfloat16())


def quantized_linear(x: Tensor, blocks: Tensor, shape: BlockShape, bias: Tensor | None) -> Tensor:
    """See `specdec.quantization.reference.linear_reference`."""
    library = load_cpu_kernels()
    if library is None:
        return linear_reference(x, blocks, shape, bias)
    if blocks.dtype != torch.uint8 or tuple(blocks.shape) != shape.blocks or not blocks.is_contiguous():
        raise TypeError(f"blocks must be contiguous uint8 {shape.blocks}, got {blocks.dtype} {tuple(blocks.shape)}")
    if x.dim() != 2 or x.shape[1] != shape.inputs:
        raise ValueError(f"x must be [T, {shape.inputs}], got {tuple(x.shape)}")
    rows = x.float().contiguous()
    out = torch.empty(len(rows), shape.outputs)
    library.specdec_quantized_linear(
        ctypes.c_int64(FORMATS.index(shape.format)),
        ctypes.c_void_p(rows.data_ptr()),
        *(ctypes.c_int64(n) for n in (len(rows), shape.inputs, shape.outputs)),
        ctypes.c_void_p(blocks.data_ptr()),
        ctypes.c_void_p(0 if bias is None else bias.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int(torch.get_num_threads()),
    )
    return out
