"""Layers over quantised weights, and the pass that puts them into a built model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from specdec.kernels.quantized_ops import quantized_linear
from specdec.quantization import int8
from specdec.quantization.blocks import TILE, BlockShape
from specdec.quantization.reference import dequantize


class QuantizedLinear(nn.Module):
    """Does what an nn.Linear does. Takes floats of any type, and returns float32.

    Args:
        shape: of the weight.
        bias: whether there is one.
    """

    blocks: Tensor
    bias: Tensor | None

    def __init__(self, shape: BlockShape, bias: bool) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("blocks", torch.empty(shape.blocks, dtype=torch.uint8))
        self.register_buffer("bias", torch.empty(shape.outputs) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.blocks, self.shape, self.bias)


class QuantizedEmbedding(nn.Module):
    """Looks token ids up in a quantised weight: for models whose output projection is their embedding, which is then stored once.

    Args:
        linear: the output projection.
    """

    def __init__(self, linear: QuantizedLinear) -> None:
        super().__init__()
        self._shared = (linear,)  # in a tuple, so that the blocks are the state of the output projection alone

    def forward(self, tokens: Tensor) -> Tensor:
        (linear,) = self._shared
        distinct, places = torch.unique(tokens // TILE, return_inverse=True)
        return dequantize(linear.blocks[distinct], linear.shape)[places * TILE + tokens % TILE]


class WideEmbedding(nn.Embedding):
    """An embedding kept in bfloat16 that yields float32, as the quantised layers do."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


def quantize_linears(model: nn.Module, format_of: Callable[[str], str] = lambda name: "int8") -> None:
    """Replaces every nn.Linear of a built model by a QuantizedLinear, in place, and embeddings by what goes with it.

    Args:
        model: on the meta device only room is made.
        format_of: name of a linear layer -> one of `blocks.FORMATS`; weights that are there become int8.
    """
    tied: dict[int, QuantizedLinear] = {}
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                replaced = _replacement(child, format_of(f"{path}.{name}" if path else name))
                tied[id(child.weight)] = replaced
                setattr(parent, name, replaced)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Embedding):
                shared = tied.get(id(child.weight))
                setattr(parent, name, _widened(child) if shared is None else QuantizedEmbedding(shared))


def _widened(embedding: nn.Embedding) -> WideEmbedding:
    wide: WideEmbedding = WideEmbedding.from_pretrained(embedding.weight.detach().to(torch.bfloat16))  # type: ignore[no-untyped-call]
    return wide


def _replacement(linear: nn.Linear, kind: str) -> QuantizedLinear:
    with linear.weight.device:
        replaced = QuantizedLinear(BlockShape(linear.out_features, linear.in_features, kind), linear.bias is not None)
    if not linear.weight.is_meta:
        int8.quantize(linear.weight.detach(), out=replaced.blocks)
        if replaced.bias is not None:
            replaced.bias.copy_(linear.bias.detach())
    return replaced
