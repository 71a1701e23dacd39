"""Linear layers on the CPU: weights laid out once as oneDNN wants them, and the row tile at which rows are exact.

Packed layers read the weights at memory speed for up to 4 rows and cost half of torch's own product at 16 (the measured
reason for packing). Where torch has no oneDNN the layers stay as they are.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

ROW_TILES = (4, 8, 16)
"""Tried in this order. A single row often takes a path of its own through the library, and costs no less than four."""
_MOST_ROWS, _MOST_OUTPUTS = 64, 2**21
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
    """Computes the same rows in groups of various sizes; sizes that give the same bits for every row share an order.

    Many rows are compared for every size: in bfloat16 the rounding of the result hides most differences.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_MOST_ROWS, width, generator=generator).to(dtype)
    rows = max(2 * ROW_TILES[-1], min(_MOST_ROWS, _MOST_OUTPUTS // layer(x[:1]).shape[1]))
    x = x[:rows]

    def computed(size: int) -> Tensor:
        return torch.cat([layer(part) for part in torch.split(x, size)])

    reference = computed(ROW_TILES[-1])
    for tile in ROW_TILES:
        sizes = {size for size in (tile, 2 * tile, 3 * tile, 5 * tile, rows) if size <= rows and size % tile == 0}
        if all(torch.equal(computed(size), reference) for size in sizes):
            return tile
    logger.warning(
        "the %s product of %d to %d gives a row other bits for other numbers of rows, at every tile tried: "
        "near ties, the output may depend on batch and drafter here",
        *(str(dtype).removeprefix("torch."), width, layer(x[:1]).shape[1]),
    )
    return ROW_TILES[-1]
