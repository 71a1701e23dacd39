"""After drafting: which nodes are verified, by their chances. The best set is a prefix of the sorted chances.

Compiled code does it where it can be built.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from specdec.kernels import budget as kernel
from specdec.plan import Row
from specdec.scheduler.acceptance import LEVELS, RANKS, AcceptanceModel
from specdec.scheduler.flat_drafts import FlatDrafts
from specdec.scheduler.outlook import Outlook
from specdec.tree import DraftShape, Mask

Floats = NDArray[np.float64]

_CHAINS = [list(range(-1, size - 1)) for size in range(129)]


def choose_nodes(
    rows: Sequence[Row], shapes: Sequence[DraftShape], acceptance: AcceptanceModel, outlook: Outlook, cap_s: float
) -> tuple[list[Mask], list[int]]:
    """Per draft bool [n], the nodes that pay, and how many these are.

    Args:
        rows: of non-empty drafts.
        cap_s: the nodes must not make the step longer than this.
    """
    if kernel.is_available():
        return choose_compiled(rows, shapes, acceptance, outlook, cap_s)
    masks = choose_plainly(rows, shapes, acceptance, outlook, cap_s)
    return masks, [int(np.count_nonzero(mask)) for mask in masks]


def choose_compiled(
    rows: Sequence[Row], shapes: Sequence[DraftShape], acceptance: AcceptanceModel, outlook: Outlook, cap_s: float
) -> tuple[list[Mask], list[int]]:
    """`choose_nodes` with kernels."""
    options: dict[str, int] = {}
    own: list[float] = []
    parents, confidence = [shape.parents for shape in shapes], [shape.confidence for shape in shapes]
    sizes = list(map(len, parents))
    for row, size, stated in zip(rows, sizes, confidence, strict=True):
        place = options.get(row.drafter)
        if place is None:
            place = options[row.drafter] = len(options)
        shift = acceptance.of(row.drafter).shift(row.request.id)
        own += (place, size, row.draft_limit, row.depth_limit, shift, stated is not None)
    numbers = array("d", [cap_s, *outlook.numbers, len(options)])
    for name in options:
        known = acceptance.of(name)
        numbers += known.odds(LEVELS)
        numbers += known.calibration.line
        numbers += known.ranks
    numbers.append(len(rows))
    numbers.extend(own)
    keep, counts = kernel.choose_nodes(numbers, parents, [stated for stated in confidence if stated is not None])
    ends = list(accumulate(sizes, initial=0))
    return [keep[start:end] for start, end in pairwise(ends)], counts


def choose_plainly(
    rows: Sequence[Row], shapes: Sequence[DraftShape], acceptance: AcceptanceModel, outlook: Outlook, cap_s: float
) -> list[Mask]:
    """The masks of `choose_nodes` without kernels."""
    flat = FlatDrafts.of(shapes)
    chances = node_chances(rows, shapes, flat, acceptance)
    limits = np.array([(row.draft_limit, row.depth_limit) for row in rows]).T
    if not (flat.sizes <= limits.min(0)).all():
        places = np.arange(len(flat.rows)) - flat.starts[flat.rows]
        chances *= (places < limits[0][flat.rows]) & (flat.depths <= limits[1][flat.rows])
    # what brings less than choosing a token costs is in no best set: that leaves few to sort
    worth = chances > outlook.least_chance
    ordered = np.sort(chances[worth])[::-1]
    return flat.split(first(chances, ordered, outlook.best_prefix(ordered, cap_s)))


def node_chances(rows: Sequence[Row], shapes: Sequence[DraftShape], flat: FlatDrafts, acceptance: AcceptanceModel) -> Floats:
    """[n]: chance of each node of non-empty drafts to be accepted, whatever the limits of its row."""
    return flat.path_products(_rates(rows, shapes, flat, acceptance))


def within(shape: DraftShape, max_nodes: int, max_depth: int) -> Mask:
    """bool [n]: the first `max_nodes` nodes that lie no deeper than `max_depth`; at once for a chain."""
    if not is_chain(shape):
        return shape.within(max_nodes, max_depth)
    keep = np.ones(len(shape), dtype=np.bool_)
    keep[min(max_nodes, max_depth) :] = False
    return keep


def is_chain(shape: DraftShape) -> bool:
    """Whether every node is the only child of the one before it."""
    size, parents = len(shape), shape.parents.tolist()
    return bool(parents == (_CHAINS[size] if size < len(_CHAINS) else list(range(-1, size - 1))))


def _rates(rows: Sequence[Row], shapes: Sequence[DraftShape], flat: FlatDrafts, acceptance: AcceptanceModel) -> Floats:
    """[n]: chance of each node given that its parent is accepted."""
    rates = np.empty(len(flat.rows))
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
        groups.setdefault((row.drafter, shape.confidence is not None), []).append(index)
    for (option, told), chosen in groups.items():
        known = acceptance.of(option)
        at: slice | Mask = slice(None)
        own = flat.rows
        if len(groups) > 1:
            place = np.full(len(rows), -1)
            place[chosen] = np.arange(len(chosen))
            at = place[flat.rows] >= 0
            own = place[flat.rows[at]]
        names = [rows[index].request.id for index in chosen]
        if told:
            stated = np.concatenate([shapes[index].confidence for index in chosen]).astype(np.float64)
            rates[at] = known.node_rates(stated, own, names)
        else:
            levels = np.minimum(flat.depths[at], LEVELS) - 1
            rates[at] = known.rates(names, int(levels.max()) + 1)[own, levels]
            if not flat.are_chains:
                counts, ranks = flat.siblings()[at], flat.ranks()[at]
                rates[at] *= known.rank_shares()[np.minimum(counts, RANKS) - 1, np.minimum(ranks, RANKS - 1)]
    return rates


def first(chances: Floats, ordered: Floats, count: int) -> Mask:
    """bool [n]: the `count` nodes of the highest chance; of equal ones those that come first, so that parents stay.

    Args:
        ordered: the highest of `chances`, falling, at least `count` of them.
    """
    if count <= 0:
        return np.zeros(len(chances), dtype=np.bool_)
    least = ordered[count - 1]
    keep: Mask = chances > least
    equal = np.flatnonzero(chances == least)
    keep[equal[: count - int(keep.sum())]] = True
    return keep
