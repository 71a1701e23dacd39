"""Before drafting: how deep each row drafts, from the rates of the past. Pure arithmetic on what the models predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.plan import Row
from specdec.scheduler.acceptance import LEVELS, AcceptanceModel
from specdec.scheduler.cost_model import CostModel, StepWork
from specdec.scheduler.options import parts_of
from specdec.scheduler.probing import PATIENCE
from specdec.scheduler.probing import SHARE as PROBE_SHARE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_CAPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Depths at which drafting is weighed against the deepest row: a level costs its drafter a step for all rows together."""


@dataclass(frozen=True)
class Ask:
    """How a row drafts: with which drafter, at most so many nodes, so many levels deep."""

    drafter: str
    limit: int
    depth: int


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

    Attributes:
        full_s: predicted wall time of the step without nodes.
        base_s: what of it goes to the rows that emit.
        goodput_off: tokens per second without drafts.
    """

    def __init__(self, costs: CostModel, base: StepWork, num_emitting: int, drafting: bool = False, token_s: float = math.inf) -> None:
        self._costs = costs
        self._tokens = base.tokens
        self._emitting = max(num_emitting, 1e-3)  # a step that emits nothing has nothing to lose but time
        predicted = costs.predict(base)
        self._draft_s = sum(predicted.draft_s.values()) if drafting else 0.0
        self.full_s = predicted.total_s - sum(predicted.draft_s.values()) + self._draft_s
        prompt_s = costs.verify_one_s(base.tokens) - costs.verify_one_s(max(1, min(num_emitting, base.tokens)))
        alone_s = self.full_s - prompt_s
        self.base_s = max(_LEAST_SHARE * alone_s, min(alone_s, self._emitting * token_s + self._draft_s))
        self.goodput_off = self._emitting / self.base_s

    def token_s(self, decoding: int) -> float | None:
        """What a decoding row of this step takes for a token without drafts: beside prompt tokens, what it adds to those."""
        if decoding == 0:
            return None
        if self._tokens > decoding:
            return (self._costs.verify_one_s(self._tokens) - self._costs.verify_one_s(self._tokens - decoding)) / decoding
        return (self.full_s - self._draft_s) / decoding

    def node_seconds(self, counts: Ints) -> Floats:
        """[n]: what so many nodes add to the step's forward and choices."""
        base = self._costs.verify_one_s(self._tokens)
        seconds: Floats = self._costs.verify_s(self._tokens + counts) - base + self._costs.logit_row_s * counts
        return seconds

    def seconds_with(self, count: int) -> float:
        """Predicted wall time of the step with so many nodes."""
        return self.full_s + float(self.node_seconds(np.array([count]))[0])

    def draft_s(self, option: str, rows: int, depth: int) -> float:
        return sum([self._costs.draft_s(part, rows, depth) for part in parts_of(option)])

    def best_prefix(self, ordered: Floats, cap_s: float) -> int:
        """How many nodes give the best goodput within `cap_s`, given their chances, the highest first."""
        nodes = self.node_seconds(np.arange(len(ordered) + 1))
        gains = np.concatenate(([0.0], ordered.cumsum()))
        goodput = (self._emitting + gains) / (self.base_s + nodes)
        if self.full_s + nodes[-1] > cap_s:
            goodput[1:][self.full_s + nodes[1:] > cap_s] = 0.0
        best = int(goodput.argmax())
        return min(best, int(np.count_nonzero(ordered)))

    def goodput(self, gains: Floats, nodes: Floats, draft_s: Floats, cap_s: float) -> Floats:
        """[n]: tokens per second with the first so many candidates; 0 where the step would take more than `cap_s`.

        Args:
            gains: [n], tokens that each is expected to bring.
            nodes: [n], nodes that it takes, which need not be whole.
            draft_s: [n], seconds of the drafters for as many.
        """
        total = nodes.cumsum()
        below = total.astype(np.int64)
        seconds = self.node_seconds(below)
        seconds += (total - below) * (self.node_seconds(below + 1) - seconds)
        seconds += draft_s
        found: Floats = (self._emitting + gains.cumsum()) / (self.base_s + seconds)
        found[self.full_s + seconds > cap_s] = 0.0
        return found

    def net_values(self, assignment: Sequence[str], rows: Sequence[Row], acceptance: AcceptanceModel) -> Floats:
        """[rows]: tokens that a row expects of its drafter, less those that its seconds are worth at the present goodput."""
        chances, widths = curves(assignment, rows, acceptance)
        node_s = float(self.node_seconds(np.array([len(rows)]))[0]) / len(rows)
        values = (chances - self.goodput_off * node_s * widths).cumsum(1)
        depth = values.argmax(1)
        call_s = [self.draft_s(option, 1, int(level) + 1) if option else 0.0 for option, level in zip(assignment, depth, strict=True)]
        net: Floats = values.max(1) - self.goodput_off * np.array(call_s)
        return net

    def probe_costs(self, option: str, rows: int, levels: int) -> Floats:
        """[levels]: what it costs to draft so many rows 1, 2, ... levels deep and to verify it; `option` empty if drafted already."""
        depths = np.arange(1, levels + 1)
        drafts = np.array([self.draft_s(option, rows, int(depth)) for depth in depths]) if option else 0.0
        costs: Floats = drafts + self.node_seconds(depths * rows) + 1e-3 * self.base_s
        return costs

    def probe_levels(self, option: str, rows: int, most: int) -> int:
        """How deep to probe: as deep as is paid off while it is waited for, or where a level costs more, as deep as adds little."""
        costs = self.probe_costs(option, rows, most)
        return int((costs <= max(PROBE_SHARE * PATIENCE * self.base_s, 1.5 * costs[0])).sum())

    def probe_rows(self, option: str) -> int:
        """How many rows can be probed for the price that is paid off while it is waited for."""
        return int(PROBE_SHARE * PATIENCE * self.base_s / float(self.probe_costs(option, 1, 1)[0]))

    def draft_seconds(self, parts: Sequence[tuple[str, NDArray[np.bool_]]], levels: Ints) -> Floats:
        """[n]: seconds of the drafters if the first so many candidates were asked for.

        Args:
            parts: drafters, and bool [n] which candidates are theirs.
            levels: [n], the level of each candidate, from 1.
        """
        total = np.zeros(len(levels))
        for name, own in parts:
            once, row, level, both = self._costs.draft_coefficients(name)
            rows = (own & (levels == 1)).cumsum()
            depth = np.maximum.accumulate(np.where(own, levels, 0))
            total += np.where(rows > 0, once + row * rows + level * depth + both * rows * depth, 0.0)
        return total


def curves(assignment: Sequence[str], rows: Sequence[Row], acceptance: AcceptanceModel) -> tuple[Floats, Floats]:
    """[rows, levels] twice: the chance that a level is proposed and accepted, and the nodes that it takes."""
    levels = min(LEVELS, max(min(row.depth_limit, row.draft_limit) for row in rows))
    chances, widths = np.zeros((len(rows), levels)), np.ones((len(rows), levels))
    for option in dict.fromkeys(assignment):
        if option:
            chosen = [index for index, own in enumerate(assignment) if own == option]
            known = acceptance.of(option)
            width = known.width[:levels]
            rates = known.rates([rows[index].request.id for index in chosen], levels)
            chances[chosen] = rates.cumprod(1) * np.minimum(width, 1.0)
            widths[chosen] = np.maximum(width, 1e-2)
    return chances, widths


def choose_depths(
    rows: Sequence[Row],
    assignment: Sequence[str],
    acceptance: AcceptanceModel,
    outlook: Outlook,
    cap_s: float,
    limit_of: Callable[[str, Row, int], int],
) -> tuple[list[Ask | None], float]:
    """The best depth for each row with the drafter it was given, and the goodput that this is predicted to bring.

    Args:
        assignment: per row an option, or empty where it has none.
        cap_s: the step must not become longer than this.
        limit_of: (option, row, depth) -> nodes that such a draft may have.
    """
    chances, widths = curves(assignment, rows, acceptance)
    levels = chances.shape[1]
    limits = np.array([min(row.depth_limit, row.draft_limit) if option else 0 for row, option in zip(rows, assignment, strict=True)])
    open_ = np.arange(levels) < limits[:, None]
    # a chance per node; never more than the level above, so that a prefix is closed
    density = np.minimum.accumulate(chances / widths, axis=1)
    order = np.argsort(-density[open_], kind="stable")
    gains, nodes = chances[open_][order], widths[open_][order]
    owners, depths = (places[order] for places in np.nonzero(open_))
    depths = depths + 1
    named = {name for option in set(assignment) for name in parts_of(option or "off")}
    parts = [(name, np.array([name in parts_of(option or "off") for option in assignment])[owners]) for name in sorted(named)]
    best_goodput, best = outlook.goodput_off, np.zeros(len(rows), dtype=np.int64)
    caps = [cap for cap in _CAPS if cap < levels] if len(rows) > 1 else []  # the prefixes of one row's draft are all its depths
    for cap in [*caps, levels]:
        within = depths <= cap
        draft_s = outlook.draft_seconds([(name, own[within]) for name, own in parts], depths[within])
        goodput = outlook.goodput(gains[within], nodes[within], draft_s, cap_s)
        if len(goodput) and goodput.max() > best_goodput:
            count = int(goodput.argmax()) + 1
            best_goodput = float(goodput.max())
            best = np.bincount(owners[within][:count], minlength=len(rows))
    asks = [
        Ask(option, limit_of(option, row, int(depth)), int(depth)) if depth else None
        for option, row, depth in zip(assignment, rows, best, strict=True)
    ]
    return asks, best_goodput
