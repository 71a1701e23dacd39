"""Seconds of a target forward by its token rows: measured, or a roofline where nothing was. Values only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Token rows at which forwards are measured: close together where drafting decides."""
_DRAFT_TERMS = 5
_LEAST_S, _MOST_S, _MOST_COUNT, _MOST_TOKENS = 1e-12, 1e6, 1_000_000, 2**31  # what a table may hold: one that was damaged must do no harm


@dataclass(frozen=True)
class CostTable:
    """Verify seconds at a few sizes; between them the cost is linear.

    Attributes:
        tokens: token rows, ascending, the first is 1.
        seconds: of a forward of so many rows that reads next to no KV; ascending.
        kv_token_s: seconds per token of KV read, once for all rows of a request.
        pair_s: seconds per token row and token of KV that it attends to: what attention computes, where that is not hidden by reading.
        weight: steps that the table is worth when what is observed differs: 0 for a guess.
        drafts: drafter name -> seconds of a call per 1, row, level, row x level and token to catch up with, where measured.
        deepest: levels that the drafters were measured for.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    kv_token_s: float = 0.0
    weight: int = 0
    drafts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    deepest: int = 0
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in itertools.pairwise(self.tokens))
        if (
            not self.tokens
            or self.tokens[0] != 1
            or len(self.tokens) != len(self.seconds)
            or not ascending
            or self.tokens[-1] > _MOST_TOKENS
        ):
            raise ValueError(
                f"a cost table needs seconds for ascending sizes from 1 to {_MOST_TOKENS}, got {self.tokens} and {self.seconds}"
            )
        if any(a > b for a, b in itertools.pairwise(self.seconds)) or not all(_LEAST_S <= own <= _MOST_S for own in self.seconds):
            raise ValueError(f"seconds must ascend, from {_LEAST_S} to {_MOST_S:g}, got {self.seconds}")
        if (
            not 0 <= self.kv_token_s <= 1
            or not 0 <= self.pair_s <= 1
            or not 0 <= self.weight <= _MOST_COUNT
            or not 0 <= self.deepest <= _MOST_COUNT
        ):
            raise ValueError(
                f"got {self.kv_token_s} s per KV token, {self.pair_s} s per pair, a weight of {self.weight} and a depth of {self.deepest}"
            )
        for name, own_s in self.drafts.items():
            if len(own_s) != _DRAFT_TERMS or not all(0 <= term <= _MOST_S for term in own_s):
                raise ValueError(f"a draft needs {_DRAFT_TERMS} numbers of seconds of 0 or more, got {own_s} for {name}")

    @classmethod
    def measured(
        cls,
        points: Mapping[int, float],
        kv_token_s: float = 0.0,
        weight: int = 20,
        drafts: Mapping[str, tuple[float, ...]] | None = None,
        deepest: int = 0,
        pair_s: float = 0.0,
    ) -> CostTable:
        """A table of measurements, made ascending: more rows never take less time.

        Half way between the running maximum and the running minimum from the other end, so that one disturbed measurement moves
        its neighbours by half.
        """
        tokens = tuple(sorted(points))
        seconds = [points[size] for size in tokens]
        upper = list(itertools.accumulate(seconds, max))
        lower = list(itertools.accumulate(reversed(seconds), min))[::-1]
        smooth = tuple((high + low) / 2 for high, low in zip(upper, lower, strict=True))
        return cls(tokens, smooth, kv_token_s, weight, drafts or {}, deepest, pair_s)

    @classmethod
    def roofline(
        cls,
        weight_bytes: float,
        flops_per_token: float,
        *,
        bytes_per_s: float,
        flops_per_s: float,
        overhead_s: float = 0.0,
        kv_bytes_per_token: float = 0.0,
        tokens: Sequence[int] = GRID,
    ) -> CostTable:
        """max(bytes / bandwidth, flops / rate) + overhead, a guess."""
        read_s = weight_bytes / bytes_per_s
        seconds = tuple(max(read_s, count * flops_per_token / flops_per_s) + overhead_s for count in tokens)
        return cls(tuple(tokens), seconds, kv_bytes_per_token / bytes_per_s)

    @classmethod
    def guess(cls) -> CostTable:
        """Where nothing at all is known: 10 ms, and twice that at 32 rows. The first steps set the scale."""
        return cls(GRID, tuple(0.010 * (1 + count / 32) for count in GRID), 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostTable:  # JSON values, checked in __post_init__
        """Reads `to_dict`. Raises ValueError, TypeError or KeyError where it is none."""
        if not isinstance(values["drafts"], Mapping):
            raise TypeError(f"drafts must be a mapping, got {type(values['drafts']).__name__}")
        tokens, seconds = tuple(map(int, values["tokens"])), tuple(map(float, values["seconds"]))
        drafts = {str(name): tuple(map(float, own)) for name, own in values["drafts"].items()}
        kv_token_s, pair_s = float(values["kv_token_s"]), float(values["pair_s"])
        return cls(tokens, seconds, kv_token_s, int(values["weight"]), drafts, int(values["deepest"]), pair_s)
