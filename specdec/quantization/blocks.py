"""How a quantised weight lies in memory: tiles of 32 outputs, each one stream of bytes that a product reads front to back.

    weight [outputs, inputs] -> blocks uint8 [tiles, tile_bytes]; inputs padded to whole pairs of parts, a part is 32 inputs

    int8 tile    | group, group, ... |                            a group is two pairs, the last one may be one
         group   | scales bfloat16 [32] | pair, pair |
         pair    | bytes [8][2 parts][32 outputs][4 inputs] |                                  scale * (byte - 128)

    int4 tile    | steps float32 [32] | group, group, ... |
         group   | outputs 0 to 15: pair, pair | outputs 16 to 31: pair, pair |
         pair    | scales int16 [16 outputs][2 parts] | offsets int16 [16][2] | bytes [8][4][2][2 parts][4 inputs] |
                   low nibbles of bytes [.][j][o]: output 4 j + o; high: 4 j + 2 + o           step * (scale * (nibble - 8) + offset)

The layout is that of `specdec/kernels/cpu/quantized.h`, which says why.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = ("int8", "int4")  # by their number in quantized.h
TILE = 32
PART = 32
PAIR = 2 * PART
GROUP_PAIRS = 2
GROUP_PARTS = 2 * GROUP_PAIRS
GROUP = PART * GROUP_PARTS
PAIR_HEAD = TILE * 2 * 2  # bytes of the scales and offsets of an int4 pair of 16 outputs
PAIR_BYTES = PAIR_HEAD + TILE // 2 * PAIR // 2
LAYOUT_VERSION = 3  # of the blocks; kept files of another version are not used


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
    def pairs(self) -> int:
        return -(-self.inputs // PAIR)

    @property
    def parts(self) -> int:
        return 2 * self.pairs

    @property
    def groups(self) -> int:
        return -(-self.pairs // GROUP_PAIRS)

    @property
    def padded(self) -> int:
        """Inputs with padding."""
        return self.pairs * PAIR

    @property
    def tiles(self) -> int:
        return -(-self.outputs // TILE)

    @property
    def blocks(self) -> tuple[int, int]:
        """Shape of the uint8 tensor that holds it all."""
        if self.format == "int8":
            return self.tiles, self.groups * TILE * 2 + self.padded * TILE
        return self.tiles, TILE * 4 + self.pairs * 2 * PAIR_BYTES
