"""A step's seconds and tokens as drafts are added to it: what every decision about drafts is weighed with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.scheduler.cost_model import CostModel, StepWork
from specdec.scheduler.options import parts_of
from specdec.scheduler.probing import PATIENCE
from specdec.scheduler.probing import SHARE as PROBE_SHARE

Floats = NDArray[np.float64]

_LEAST_SHARE = 0.05  # of a step that goes to the rows that emit, however cheaply they ride along


class Outlook:
    """A step's seconds and tokens as drafts are added to it.

    Prompt tokens in the step are work of their own: the drafts are weighed as if the step had only its decoding rows, but what a
    node costs is taken where it really comes, behind the prompt tokens. Where most steps carry prompt tokens, a decoding row
    rides along for little, so an accepted token saves little: `token_s` says how much lately.

    Args:
        base: the step without nodes.
        num_emitting: rows that emit a token in any case.
        drafting: the drafts in `base.drafts` have been made, and their seconds are spent.
        token_s: what a row lately took for a token without drafts; infinite where that is not known.
        prompt_tokens: what will join the step beside `base`, and be made to fit.

    Attributes:
        full_s: predicted wall time of the step without nodes.
        base_s: what of it goes to the rows that emit.
        emitting: tokens that come in any case.
        goodput_off: tokens per second without drafts.
    """

    def __init__(
        self,
        costs: CostModel,
        base: StepWork,
        num_emitting: int,
        *,
        drafting: bool = False,
        token_s: float = math.inf,
        prompt_tokens: int = 0,
    ) -> None:
        self._costs = costs
        self._tokens = base.tokens + prompt_tokens
        self._verify_s = costs.verify_one_s(self._tokens)
        self._row_s = costs.logit_row_s + costs.node_kv_s(base.context)  # of a node, beside its row in the products
        self.emitting = max(num_emitting, 1e-3)  # a step that emits nothing has nothing to lose but time
        predicted = costs.predict(base)
        spent_s = sum(predicted.draft_s.values()) if predicted.draft_s else 0.0
        self._draft_s = spent_s if drafting else 0.0
        self.full_s = predicted.total_s - spent_s + self._draft_s
        alone, alone_s = max(1, min(num_emitting, base.tokens)), self.full_s
        if alone != base.tokens:
            alone_s += costs.verify_one_s(alone) - costs.verify_one_s(base.tokens)
        self.base_s = max(_LEAST_SHARE * alone_s, min(alone_s, self.emitting * token_s + self._draft_s))
        self.goodput_off = self.emitting / self.base_s

    def token_s(self, decoding: int) -> float:
        """What one of `decoding` rows takes for a token without drafts: beside prompt tokens, what it adds to those."""
        if self._tokens > decoding:
            return (self._verify_s - self._costs.verify_one_s(self._tokens - decoding)) / decoding + self._costs.logit_row_s
        return (self.full_s - self._draft_s) / decoding

    def has_prompts(self, decoding: int) -> bool:
        """Whether there are prompt tokens beside so many decoding rows."""
        return self._tokens > decoding

    # Verifying

    def node_s(self, count: float) -> float:
        """What so many nodes, which need not be whole, add to the step's forward and choices."""
        return self._costs.verify_one_s(self._tokens + count) - self._verify_s + self._row_s * count

    def node_seconds(self, counts: Floats | NDArray[np.int64]) -> Floats:
        """The same for many counts, of any shape."""
        seconds: Floats = self._costs.verify_s(self._tokens + counts)
        seconds += self._row_s * counts - self._verify_s
        return seconds

    @property
    def least_chance(self) -> float:
        """A node of a lower chance is in no best set: it brings less than its attention and its choice cost, were the rest free."""
        return self.goodput_off * self._row_s

    @property
    def numbers(self) -> list[float]:
        """What the kernels weigh drafts with, in the order of `Outlook` in `specdec/kernels/cpu/budget.h`."""
        curve = self._costs.curve
        return [
            *(self.emitting, self.base_s, self.full_s, self.goodput_off, self.least_chance, self._row_s),
            *(self._tokens, self._verify_s, curve.slope, len(curve.tokens), *curve.tokens, *curve.seconds),
        ]

    def best_prefix(self, ordered: Floats, cap_s: float) -> int:
        """How many nodes give the best goodput within `cap_s`, given their chances, the highest first."""
        if len(ordered) == 0:
            return 0
        seconds = self.node_seconds(np.arange(1, len(ordered) + 1))
        goodput = (self.emitting + ordered.cumsum()) / (self.base_s + seconds)
        goodput[(ordered <= 0) | (self.full_s + seconds > cap_s)] = 0.0
        best = int(goodput.argmax())
        return best + 1 if goodput[best] > self.goodput_off else 0

    # Drafting

    def draft_s(self, option: str, rows: int, depth: int, catch_up: int = 0) -> float:
        """Seconds of an option's drafters for so many rows and levels."""
        return sum([self._costs.draft_s(part, rows, depth, catch_up) for part in parts_of(option)])

    def draft_coefficients(self, option: str) -> list[tuple[str, Sequence[float]]]:
        """Of each of its drafters, seconds of a call per 1, row, level and row x level."""
        return [(part, self._costs.draft_coefficients(part)) for part in parts_of(option)]

    def depth_within(self, option: str, rows: int, most: int, share: float) -> int:
        """How deep all rows can be drafted within a share of the step."""
        once_s, level_s = 0.0, 0.0
        for _, (once, row, level, both, _) in self.draft_coefficients(option):
            once_s += once + row * rows
            level_s += level + both * rows
        left_s = share * self.base_s - once_s
        if left_s < level_s:
            return 0
        return most if level_s * most <= left_s else int(left_s / level_s)

    # Probing

    @property
    def probe_budget_s(self) -> float:
        """What a probe may cost so that it is paid off while it is waited for."""
        return PROBE_SHARE * PATIENCE * self.base_s

    def probe_s(self, option: str, rows: int, depth: int) -> float:
        """What it costs to draft so many rows so deep and to verify it; `option` empty if drafted already."""
        return (self.draft_s(option, rows, depth) if option else 0.0) + self.node_s(depth * rows) + 1e-3 * self.base_s

    def probe_levels(self, option: str, rows: int, most: int) -> int:
        """How deep to probe: as deep as is paid off while it is waited for, or where a level costs more, as deep as adds little."""
        enough_s = max(self.probe_budget_s, 1.5 * self.probe_s(option, rows, 1))
        levels = min(most, 1)
        while levels < most and self.probe_s(option, rows, levels + 1) <= enough_s:
            levels += 1
        return levels

    def probe_rows(self, option: str) -> int:
        """How many rows can be probed for the price that is paid off while it is waited for."""
        return int(self.probe_budget_s / self.probe_s(option, 1, 1))
