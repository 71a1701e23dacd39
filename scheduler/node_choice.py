"""After drafting: which nodes are verified, by their chances. The best set is a prefix of the sorted chances.

There are two ways to compute it, which agree: plain numbers for few nodes, and arrays for many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.plan import Row
from specdec.scheduler.acceptance import LEVELS, RANKS, AcceptanceModel
from specdec.scheduler.flat_drafts import FlatDrafts
from specdec.scheduler.outlook import Outlook
from specdec.tree import DraftShape, Mask

Floats = NDArray[np.float64]

FEW = 64
"""Nodes up to which plain numbers are faster."""
_CHAINS = [list(range(-1, size - 1)) for size in range(129)]


def choose_nodes(
    rows: Sequence[Row], shapes: Sequence[DraftShape], flat: FlatDrafts | None, acceptance: AcceptanceModel, outlook: Outlook, cap_s: float
) -> list[Mask]:
    """Per draft bool [n]: the nodes that pay.

    Args:
        rows: of non-empty drafts.
        flat: the drafts as arrays; None for few nodes.
        cap_s: the nodes must not make the step longer than this.
    """
    if flat is None:
        return choose_few(rows, shapes, acceptance, outlook, cap_s)
    return choose_many(rows, shapes, flat, acceptance, outlook, cap_s)


def choose_few(
    rows: Sequence[Row], shapes: Sequence[DraftShape], acceptance: AcceptanceModel, outlook: Outlook, cap_s: float
) -> list[Mask]:
    """With plain numbers."""
    nodes = []  # (-chance, draft, node): equal chances in this order, so that parents stay
    for index, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
        chances = node_chances(row, shape, acceptance)
        nodes += [(-chance, index, node) for node, chance in enumerate(chances) if chance > 0]
    nodes.sort()
    kept: list[list[bool]] = [[False] * len(shape) for shape in shapes]
    for _, index, node in nodes[: outlook.best_prefix([-chance for chance, _, _ in nodes], cap_s)]:
        kept[index][node] = True
    return [np.array(own) for own in kept]


def node_chances(row: Row, shape: DraftShape, acceptance: AcceptanceModel) -> list[float]:
    """Chance of each node to be accepted; 0 for those beyond the limits that the row was planned with."""
    known, name = acceptance.of(row.drafter), row.request.id
    parents = shape.parents.tolist()
    most = min(row.draft_limit, len(parents))
    chances, depths = [0.0] * (len(parents) + 1), [0] * (len(parents) + 1)  # the last stands for the root, to which -1 points
    chances[-1] = 1.0
    stated = None if shape.confidence is None else shape.confidence.tolist()
    rates = known.level_rates(name, min(most, LEVELS)) if stated is None else []
    has_siblings = stated is None and not is_chain(shape)
    shares = known.rank_shares().tolist() if has_siblings else []
    elder = [0] * (len(parents) + 1)
    for node in range(most):
        parent = parents[node]
        depths[node] = depth = depths[parent] + 1
        if depth > row.depth_limit:
            continue
        if stated is not None:
            rate = known.node_rate(stated[node], name)
        else:
            rate = rates[min(depth, LEVELS) - 1]
            if has_siblings:
                rate *= shares[min(parents.count(parent), RANKS) - 1][min(elder[parent], RANKS - 1)]
                elder[parent] += 1
        chances[node] = chances[parent] * rate
    return chances[:-1]


def choose_many(
    rows: Sequence[Row], shapes: Sequence[DraftShape], flat: FlatDrafts, acceptance: AcceptanceModel, outlook: Outlook, cap_s: float
) -> list[Mask]:
    """The same with arrays."""
    chances = flat.path_products(_rates(rows, shapes, flat, acceptance))
    limits = np.array([(row.draft_limit, row.depth_limit) for row in rows]).T
    if not (flat.sizes <= limits.min(0)).all():
        places = np.arange(len(flat.rows)) - flat.starts[flat.rows]
        chances *= (places < limits[0][flat.rows]) & (flat.depths <= limits[1][flat.rows])
    # what brings less than choosing a token costs is in no best set: that leaves few to sort
    worth = chances > outlook.least_chance
    ordered = np.sort(chances[worth])[::-1]
    return flat.split(first(chances, ordered, outlook.best_long_prefix(ordered, cap_s)))


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
