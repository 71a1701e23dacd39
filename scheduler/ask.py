"""Before drafting: how deep each row drafts, from the rates of the past. Pure arithmetic on what the models predict.

There are two ways to compute it, which agree: plain numbers for few candidates, and arrays for many. A call into an array
library takes about as long as ten steps of plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from specdec.plan import Row
from specdec.scheduler.acceptance import LEVELS, AcceptanceModel
from specdec.scheduler.options import parts_of
from specdec.scheduler.outlook import Outlook

Floats = NDArray[np.float64]

CAPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Depths at which drafting is weighed against the deepest row: a level costs its drafter a step for all rows together."""
FEW = 32
"""Candidates up to which plain numbers are faster."""
_LEAST_WIDTH = 1e-2


@dataclass(frozen=True)
class Ask:
    """How a row drafts: with which drafter, at most so many nodes, so many levels deep."""

    drafter: str
    limit: int
    depth: int


@dataclass(frozen=True)
class Candidate:
    """A row that may draft, with the way to draft that it was given.

    Attributes:
        row: of the plan.
        option: empty where it has none.
        fee_s: what its drafter needs to catch up with it, spread over the steps that are still to be expected.
    """

    row: Row
    option: str
    fee_s: float = 0.0

    @property
    def limit(self) -> int:
        """Levels that may be asked for."""
        return min(self.row.depth_limit, self.row.draft_limit, LEVELS) if self.option else 0


def choose_depths(
    candidates: Sequence[Candidate],
    acceptance: AcceptanceModel,
    outlook: Outlook,
    cap_s: float,
    limit_of: Callable[[str, Row, int], int],
) -> tuple[list[Ask | None], float]:
    """The best depth for each row with the drafter it was given, and the goodput that this is predicted to bring.

    Args:
        cap_s: the step must not become longer than this.
        limit_of: (option, row, depth) -> nodes that such a draft may have.
    """
    least = outlook.least_chance
    levels = [
        acceptance.of(one.option).levels_above(one.row.request.id, one.limit, least) if one.limit else 0  # deeper ones are in no best set
        for one in candidates
    ]
    if not any(levels):
        return [None] * len(candidates), outlook.goodput_off
    caps = [cap for cap in CAPS if cap < max(levels)] if len(candidates) > 1 else []  # the prefixes of one row's draft are all its depths
    choose = choose_few if sum(levels) <= FEW else choose_many
    depths, goodput = choose(candidates, levels, [*caps, max(levels)], acceptance, outlook, cap_s)
    asks = [
        Ask(one.option, limit_of(one.option, one.row, depth), depth) if depth else None
        for one, depth in zip(candidates, depths, strict=True)
    ]
    return asks, goodput


def choose_few(
    candidates: Sequence[Candidate], levels: Sequence[int], caps: Sequence[int], acceptance: AcceptanceModel, outlook: Outlook, cap_s: float
) -> tuple[list[int], float]:
    """Depth per row and goodput, with plain numbers.

    Args:
        levels: per row, the most that may be asked for.
        caps: depths of the deepest row to weigh, ascending; of those only that are below what is best under the last.
    """
    nodes = []  # (-order, row, level from 1, chance, width)
    coefficients = [own for _, own in _drafters(candidates, outlook)]
    owned = _owned(candidates, [name for name, _ in _drafters(candidates, outlook)])
    for index, (one, most) in enumerate(zip(candidates, levels, strict=True)):
        if not most:
            continue
        known = acceptance.of(one.option)
        widths = [max(width, _LEAST_WIDTH) for width in known.verified_width[:most]]
        rates = accumulate(known.level_rates(one.row.request.id, most), mul)
        chances = [rate * min(width, 1.0) for rate, width in zip(rates, widths, strict=True)]
        worth = _worth(sum(chances), one.fee_s * outlook.goodput_off)
        # a chance per node; never more than the level above, so that a prefix is closed
        order = accumulate([worth * chance / width for chance, width in zip(chances, widths, strict=True)], min)
        if worth > 0:
            nodes += [(-own, index, level, *two) for level, (own, *two) in enumerate(zip(order, chances, widths, strict=True), 1)]
    nodes.sort()
    emitting, base_s, full_s, node_s = outlook.emitting, outlook.base_s, outlook.full_s, cache(outlook.node_s)
    best_goodput, best_cap, best_place, deepest_level = outlook.goodput_off, 0, -1, 0
    for cap in reversed(caps):
        if cap < caps[-1] and cap >= deepest_level:
            continue
        gains = count = fees_s = draft_s = 0.0
        rows, deepest = [0] * len(coefficients), [0] * len(coefficients)
        for place, (_, index, level, chance, width) in enumerate(nodes):
            if level > cap:
                continue
            gains += chance
            count += width
            if level == 1:
                fees_s += candidates[index].fee_s
            if level == 1 or level > min(deepest):
                for part in owned[index]:
                    rows[part] += level == 1
                    deepest[part] = max(deepest[part], level)
                draft_s = fees_s
                for asked, depth, (once, row, per_level, both, _) in zip(rows, deepest, coefficients, strict=True):
                    if asked:
                        draft_s += once + row * asked + (per_level + both * asked) * depth
            seconds = node_s(count) + draft_s
            goodput = (emitting + gains) / (base_s + seconds)
            if goodput > best_goodput and full_s + seconds <= cap_s:
                best_goodput, best_cap, best_place = goodput, cap, place
        if cap == caps[-1]:
            deepest_level = max([level for _, _, level, _, _ in nodes[: best_place + 1]], default=0)
    depths = [0] * len(candidates)
    for _, index, level, _, _ in nodes[: best_place + 1]:
        if level <= best_cap:
            depths[index] = level
    return depths, best_goodput


def choose_many(
    candidates: Sequence[Candidate], levels: Sequence[int], caps: Sequence[int], acceptance: AcceptanceModel, outlook: Outlook, cap_s: float
) -> tuple[list[int], float]:
    """The same with arrays: all caps at once."""
    options = [one.option for one in candidates]
    chances, widths = curves(options, [one.row for one in candidates], acceptance, max(levels))
    open_ = np.arange(max(levels)) < np.array(levels)[:, None]
    fees_s = np.array([one.fee_s for one in candidates])
    totals = np.where(open_, chances, 0.0).sum(1)
    worth = np.array([_worth(total, fee * outlook.goodput_off) for total, fee in zip(totals.tolist(), fees_s.tolist(), strict=True)])
    density = np.minimum.accumulate(chances / widths * worth[:, None], axis=1)
    open_ &= density > 0
    order = np.argsort(-density[open_], kind="stable")
    owners, places = (found[order] for found in np.nonzero(open_))
    if len(order) == 0:
        return [0] * len(candidates), outlook.goodput_off
    depths, is_first = places + 1, places == 0
    within = depths <= np.array(caps)[:, None]  # [caps, n]
    nodes = (within * widths[owners, places]).cumsum(1)
    gains = (within * chances[owners, places]).cumsum(1)
    seconds = outlook.node_seconds(nodes)
    if fees_s.any():
        seconds += (within * (is_first * fees_s[owners])).cumsum(1)
    for name, (once, row, per_level, both, _) in _drafters(candidates, outlook):
        own = within
        if len(set(options)) > 1:
            own = within & np.array([name in parts_of(option or "off") for option in options])[owners]
        rows = (own & is_first).cumsum(1)
        deepest = np.maximum.accumulate(own * depths, axis=1)
        seconds += (rows > 0) * once + row * rows + (per_level + both * rows) * deepest
    goodput = (outlook.emitting + gains) / (outlook.base_s + seconds)
    if outlook.full_s + seconds.max() > cap_s:
        goodput[outlook.full_s + seconds > cap_s] = 0.0
    best = int(goodput[-1].argmax())
    deepest_level = int(depths[: best + 1].max()) if goodput[-1, best] > outlook.goodput_off else 0
    goodput[:-1][np.array(caps[:-1], dtype=np.int64) >= deepest_level] = 0.0
    # of equals the deepest cap, as it was looked at first
    from_last, place = np.unravel_index(int(goodput[::-1].argmax()), goodput.shape)
    cap = len(caps) - 1 - from_last
    if goodput[cap, place] <= outlook.goodput_off:
        return [0] * len(candidates), outlook.goodput_off
    chosen = owners[: place + 1][within[cap, : place + 1]]
    return np.bincount(chosen, minlength=len(candidates)).tolist(), float(goodput[cap, place])


def curves(options: Sequence[str], rows: Sequence[Row], acceptance: AcceptanceModel, levels: int) -> tuple[Floats, Floats]:
    """[rows, levels] twice: the chance that a level is proposed and accepted, and the nodes that it takes."""
    chances, widths = np.zeros((len(rows), levels)), np.ones((len(rows), levels))
    for option in dict.fromkeys(options):
        if option:
            chosen = [index for index, own in enumerate(options) if own == option]
            known = acceptance.of(option)
            width = np.maximum(known.verified_width[:levels], _LEAST_WIDTH)
            rates = known.rates([rows[index].request.id for index in chosen], levels)
            chances[chosen] = rates.cumprod(1) * np.minimum(width, 1.0)
            widths[chosen] = width
    return chances, widths


def _drafters(candidates: Sequence[Candidate], outlook: Outlook) -> list[tuple[str, Sequence[float]]]:
    """Every drafter that is asked by some option, with what it costs per 1, row, level and row x level."""
    found = {name: own for option in {one.option for one in candidates} if option for name, own in outlook.draft_coefficients(option)}
    return sorted(found.items())


def _owned(candidates: Sequence[Candidate], names: Sequence[str]) -> list[list[int]]:
    """Per row, the places in `names` of its drafters."""
    places = {one.option: [names.index(part) for part in parts_of(one.option or "off")] for one in candidates}
    return [places[one.option] for one in candidates]


def _worth(gains: float, fee: float) -> float:
    """What is left of a row's chances when its fee, in tokens, is paid; 0 where it is not worth it."""
    return max(0.0, 1 - fee / gains) if gains > 0 else 0.0


def net_values(options: Sequence[str], rows: Sequence[Row], acceptance: AcceptanceModel, outlook: Outlook) -> Floats:
    """[rows]: tokens that a row expects of its drafter, less those that its seconds are worth at the present goodput."""
    chances, widths = curves(options, rows, acceptance, min(LEVELS, max(min(row.depth_limit, row.draft_limit) for row in rows)))
    node_s = outlook.node_s(len(rows)) / len(rows)
    values = (chances - outlook.goodput_off * node_s * widths).cumsum(1)
    depth = values.argmax(1)
    call_s = [outlook.draft_s(option, 1, int(level) + 1) if option else 0.0 for option, level in zip(options, depth, strict=True)]
    net: Floats = values.max(1) - outlook.goodput_off * np.array(call_s)
    return net
