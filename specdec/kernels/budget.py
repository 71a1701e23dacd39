"""The draft budget's arithmetic, compiled. The references are in `specdec.scheduler`: `ask`, `node_choice` and `acceptance`.

What a step is decided by travels as one row of numbers per call: an argument of a ctypes call costs as much as ten of them.
Learned state lies in arrays that the kernels change in place.
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def is_available() -> bool:
    """Whether the kernels could be built. They share torch's OpenMP runtime, so what runs without torch, as a simulation does, has none."""
    return "torch" in sys.modules and _is_built()


@functools.cache
def _is_built() -> bool:
    from specdec.kernels.build import load_cpu_kernels  # brings torch

    return load_cpu_kernels() is not None


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:  # what the kernel gives back
    from specdec.kernels.step_ops import compiled  # brings torch

    return compiled(name)


def choose_depths(numbers: array[float], rows: int) -> tuple[list[int], float]:
    """Depth per row and goodput. `numbers` as in `specdec.scheduler.ask.choose_compiled`."""
    depths = array("q", bytes(8 * rows))
    goodput: float = _compiled("specdec_choose_depths")(numbers.buffer_info()[0], depths.buffer_info()[0])
    return depths.tolist(), goodput


def choose_nodes(
    numbers: array[float], parents: Sequence[NDArray[np.int32]], confidence: Sequence[NDArray[np.float32]]
) -> tuple[Mask, list[int]]:
    """Which nodes are verified, bool [n] over all drafts, and how many of each draft.

    Args:
        numbers: as in `specdec.scheduler.node_choice.choose_compiled`.
        parents: of every draft.
        confidence: of those drafts that have some.
    """
    flat = _joined(parents)
    keep, counts = np.empty(len(flat) // 4, dtype=np.bool_), array("q", bytes(8 * len(parents)))
    _compiled("specdec_choose_nodes")(
        numbers.buffer_info()[0], flat, _joined(confidence), keep.__array_interface__["data"][0], counts.buffer_info()[0]
    )
    return keep, counts.tolist()


def follow_widths(
    widths: array[float], verified: array[float], levels: Iterable[int], parents: Sequence[NDArray[np.int32]], keep: Sequence[Mask]
) -> bool:
    """Moves a drafter's nodes per level, proposed and verified, towards those of a step; whether those proposed moved.

    Args:
        widths, verified: [64].
        levels: per draft, how many it was asked for, from 1 to 64.
        keep: per draft, the nodes that are verified.
    """
    rows = array("q", [number for own, asked in zip(parents, levels, strict=True) for number in (len(own), asked)])
    moved: int = _compiled("specdec_follow_widths")(
        *(widths.buffer_info()[0], verified.buffer_info()[0], len(parents), rows.buffer_info()[0]),
        *(_joined(parents), b"".join([mask.tobytes() for mask in keep])),
    )
    return bool(moved)


def learn_drafts(
    rows: array[int],
    parents: Sequence[NDArray[np.int32]],
    confidence: Sequence[NDArray[np.float32]],
    paths: Iterable[int],
    step: int,
    *,
    evidence: array[float],
    shared: array[float],
    levels: array[float],
    tried: int,
    calibration: array[float],
    ranks: array[float],
) -> int:
    """Learns from a step's verified drafts of one drafter; returns how many levels they tried.

    Args:
        rows: per draft its nodes, those accepted, whether its request ended, whether it has confidences, where its evidence begins.
        parents: of every draft.
        confidence: of those drafts that have some.
        paths: the accepted nodes of all drafts, one draft after the other.
        step: its number.
        evidence, shared: see `RequestRates`.
        levels: hits, trials and log odds by level, [64] each.
        tried: levels that were tried before.
        calibration: see `Calibration`.
        ranks: see `DrafterAcceptance.rank_shares`.
    """
    accepted = array("i", paths)
    now: int = _compiled("specdec_learn_drafts")(
        *(len(parents), rows.buffer_info()[0], _joined(parents), _joined(confidence), accepted.buffer_info()[0], step),
        *(evidence.buffer_info()[0], shared.buffer_info()[0], levels.buffer_info()[0], tried),
        *(calibration.buffer_info()[0], ranks.buffer_info()[0]),
    )
    return now


def _joined(arrays: Sequence[NDArray[np.int32]] | Sequence[NDArray[np.float32]]) -> bytes:
    """One after the other, as C++ reads them."""
    joined = b"".join([own.tobytes() for own in arrays])
    if len(joined) != 4 * sum(map(len, arrays)):
        raise TypeError(f"expected numbers of 4 bytes, got {[own.dtype.name for own in arrays]}")
    return joined
