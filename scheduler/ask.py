"""Before drafting: how deep each row drafts, from the rates of the past. Pure arithmetic on what the models predict.

Compiled code does it where it can be built: a step asks with every row, and what asking costs is lost where nothing pays.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.kernels import budget as kernel
from specdec.plan import Row
from specdec.scheduler.acceptance import LEVELS, AcceptanceModel
from specdec.scheduler.options import parts_of
from specdec.scheduler.outlook import Outlook

Floats = NDArray[np.float64]

CAPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Depths at which drafting is weighed against the deepest row: a level costs its drafter a step for all rows together."""
_LEAST_WIDTH = 1e-2
_NO_DRAFT = (0, 0, 0.0, 0.0)  # a row without an option, as kernels read it


class Ask(NamedTuple):
    """How a row drafts: with which drafter, at most so many nodes, so many levels deep."""

    drafter: str
    limit: int
    depth: int


class Candidate(NamedTuple):
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
    choose = choose_compiled if kernel.is_available() else choose_plainly
    depths, goodput = choose(candidates, acceptance, outlook, cap_s)
    asks = [
        Ask(one.option, limit_of(one.option, one.row, depth), depth) if depth else None
        for one, depth in zip(candidates, depths, strict=True)
    ]
    return asks, goodput


def choose_compiled(
    candidates: Sequence[Candidate], acceptance: AcceptanceModel, outlook: Outlook, cap_s: float
) -> tuple[list[int], float]:
    """Depth per row and goodput, compiled: see `choose_plainly`."""
    options: dict[str, int] = {}
    rows: list[float] = []
    most = 0
    for row, option, fee_s in candidates:
        limit = min(row.depth_limit, row.draft_limit, LEVELS) if option else 0
        if limit == 0:
            rows += _NO_DRAFT
            continue
        place = options.get(option)
        if place is None:
            place = options[option] = len(options)
        most = max(most, limit)
        rows += (place, limit, acceptance.of(option).shift(row.request.id), fee_s)
    drafters = {name: own for option in options for name, own in outlook.draft_coefficients(option)}
    places = {name: place for place, name in enumerate(drafters)}
    numbers = array("d", [cap_s, _LEAST_WIDTH, *outlook.numbers, len(CAPS), *CAPS, len(drafters)])
    for coefficients in drafters.values():
        numbers.extend(coefficients[:4])
    numbers.extend((most, len(options)))
    for option in options:
        known = acceptance.of(option)
        numbers.append(sum([1 << places[part] for part in parts_of(option)]))
        numbers += known.odds(most)
        numbers += known.verified_width[:most]
    numbers.append(len(candidates))
    numbers.extend(rows)
    return kernel.choose_depths(numbers, len(candidates))


def choose_plainly(candidates: Sequence[Candidate], acceptance: AcceptanceModel, outlook: Outlook, cap_s: float) -> tuple[list[int], float]:
    """Depth per row and goodput: of the levels of all rows by what they bring per node, under each cap, the best prefix."""
    least = outlook.least_chance
    levels = [
        acceptance.of(one.option).levels_above(one.row.request.id, one.limit, least) if one.limit else 0  # deeper ones are in no best set
        for one in candidates
    ]
    if not any(levels):
        return [0] * len(candidates), outlook.goodput_off
    caps = [cap for cap in CAPS if cap < max(levels)] if len(candidates) > 1 else []  # the prefixes of one row's draft are all its depths
    caps.append(max(levels))
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
