"""Activation functions whose result for a row depends on that row alone, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

# torch's CPU kernels split a tensor of at least 32768 elements among threads, and run what is left of each share after
# whole groups of vectors (at most 128 elements so far) through scalar code, whose exp and tanh differ in the last bit from the
# vector code. Which elements are left over depends on the number of rows and threads.
_SERIAL_ELEMENTS = 32767
_VECTOR_ELEMENTS = 256


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) of a float tensor [T, N]."""
    return _row_exact(F.silu, torch.ops.aten.silu.out, _silu_by_expm1, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh approximation, of a float tensor [T, N]."""
    return _row_exact(
        lambda part: F.gelu(part, approximate="tanh"),
        lambda part, out: torch.ops.aten.gelu.out(part, approximate="tanh", out=out),
        _gelu_by_tanh,
        x,
    )


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def _row_exact(
    fused: Callable[[Tensor], Tensor],
    fused_out: Callable[..., Tensor],
    composed: Callable[[Tensor], Tensor],
    x: Tensor,
) -> Tensor:
    """The fused kernel where it has no scalar remainder: whole vectors per row, few enough rows for one thread."""
    if not x.is_cpu:
        return fused(x)
    rows, width = x.shape
    if width % _VECTOR_ELEMENTS or width > _SERIAL_ELEMENTS:
        return composed(x)
    step = _SERIAL_ELEMENTS // width
    if rows <= step:
        return fused(x.contiguous())
    x = x.contiguous()
    out = torch.empty_like(x)
    for start in range(0, rows, step):
        fused_out(x[start : start + step], out=out[start : start + step])
    return out


def _silu_by_expm1(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide / (torch.expm1(-wide) + 2.0)).to(x.dtype)  # expm1 and tanh run remainders through vector code


def _gelu_by_tanh(x: Tensor) -> Tensor:
    wide = x.float()
    inner = 0.7978845608028654 * (wide + 0.044715 * (wide * wide * wide))
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)
