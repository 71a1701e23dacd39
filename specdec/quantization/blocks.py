"""How a quantised weight lies in memory: tiles of 32 outputs, each one stream of bytes that a product reads front to back.

    weight [outputs, inputs] -> blocks uint8 [tiles, tile_bytes]; inputs padded with zeros to whole parts of 32, groups are 4 parts

    int8 tile   | scales bfloat16 [groups][32] | bytes [inputs / 4][32 outputs][4 inputs] |                       scale * (byte - 128)
    int4 tile   | scales float16 [parts][32] | minima float16 [parts][32] | bytes [inputs / 4][16 outputs][4] |   scale * nibble - minimum
                  low nibbles: outputs 0 to 15; high nibbles: outputs 16 to 31

The layout is that of `specdec/kernels/cpu/quantized.h`, which says why.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = ("int8", "int4")  # by their number in quantized.h
TILE = 32
PART = 32
GROUP_PARTS = 4
GROUP = PART * GROUP_PARTS
LAYOUT_VERSION = 2  # of the blocks; kept files of another version are not used


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a quantised weight.

    Attributes:
        outputs, inputs: of the weight.
        format: one of FORMATS.
    """

    outputs: int
    inputs: int
    format: str = "int8"

    @property
    def parts(self) -> int:
        return -(-self.inputs // PART)

    @property
    def groups(self) -> int:
        return -(-self.parts // GROUP_PARTS)

    @property
    def padded(self) -> int:
        """Inputs with padding."""
        return self.parts * PART

    @property
    def tiles(self) -> int:
        return -(-self.outputs // TILE)

    @property
    def head_bytes(self) -> int:
        """Of a tile: its scales, and minima."""
        return TILE * 2 * (self.groups if self.format == "int8" else 2 * self.parts)

    @property
    def blocks(self) -> tuple[int, int]:
        """Shape of the uint8 tensor that holds it all."""
        return self.tiles, self.head_bytes + self.padded * (TILE if self.format == "int8" else TILE // 2)
