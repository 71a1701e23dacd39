"""Repeated measurements of one figure. A machine is noisy: what is reported is the median, and where the middle half lies."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Samples:
    """Measurements of one figure, at least one."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Samples:
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def middle_half(self) -> tuple[float, float]:
        """The quartiles."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def to_json(self, name: str) -> dict[str, float]:
        """The median under `name`, the quartiles under `name`_low and `name`_high, and how many measurements there were."""
        low, high = self.middle_half
        return {name: self.median, f"{name}_low": low, f"{name}_high": high, "samples": len(self.values)}

    def ratios(self, others: Samples) -> Samples:
        """self / others, pair by pair: what was measured in the same moment."""
        return Samples.of(own / other for own, other in zip(self.values, others.values, strict=True))
