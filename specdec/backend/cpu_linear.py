"""Linear layers on the CPU: weights laid out once as oneDNN wants them, and the row tile at which rows are exact.

Packed layers read the weights at memory speed for up to 4 rows and cost half of torch's own product at 16 (the measured
reason for packing). Where torch has no oneDNN the layers stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROW_TILES = (1, 4, 8, 16)
"""Tried in this order; 16 was row-invariant on every machine measured."""
_PROBED_ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 24, 32, 48, 64)
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """Does what an nn.Linear does, over a weight in oneDNN's own layout.

    Args:
        linear: its weight is not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.bias = linear.bias.detach() if linear.bias is not None else None
        # the number of rows only hints at the layout, which is the same for all row counts tried
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROW_TILES[-1])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


@torch.inference_mode()
def pack_linears(model: nn.Module) -> None:
    """Replaces the linear layers of a built model by packed ones, in place; those replaced already are left alone."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # a torch built without oneDNN
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.weight.dtype in _PACKED_DTYPES:
                setattr(parent, name, PackedLinear(child))


@torch.inference_mode()
def exact_row_tile(model: nn.Module) -> int:
    """The smallest tile at which no product's rows depend on the other rows, for every number of rows tried.

    A matrix product picks its blocking, and with it the order of its sums, by the number of rows. Which numbers share
    an order is a property of library, processor and shape, so it is measured, once per shape.
    """
    layers: dict[tuple[int, int, torch.dtype], nn.Module] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            layers[module.in_features, module.out_features, module.dtype] = module
        elif isinstance(module, nn.Linear):
            layers[module.in_features, module.out_features, module.weight.dtype] = module
    return max((_exact_tile(layer, width, dtype) for (width, _, dtype), layer in layers.items()), default=1)


def _exact_tile(layer: nn.Module, width: int, dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBED_ROWS[-1], width, generator=generator).to(dtype)
    reference = torch.cat([layer(tile) for tile in torch.split(x, ROW_TILES[-1])])
    same = {rows: torch.equal(layer(x[:rows]), reference[:rows]) for rows in _PROBED_ROWS}
    return next((tile for tile in ROW_TILES if all(ok for rows, ok in same.items() if rows % tile == 0)), ROW_TILES[-1])
