"""Latency targets: how long a step may take, how much of a prompt fits into it, and which promises can no longer be kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from specdec.errors import OverloadedError
from specdec.request import Request
from specdec.scheduler.cost_model import CostModel, StepWork

MIN_CHUNK = 16
"""Prompt tokens that a step always takes, or a prompt would wait for ever beside requests whose target is too tight."""


MARGIN = 0.94
"""Of a target between tokens that a step is planned to take: half of the steps that are filled to the brim would be longer."""


def step_cap_s(running: Iterable[Request]) -> float:
    """Seconds that a step may take: the tightest target between tokens among those that run; infinite without one."""
    return MARGIN * min((request.target_itl_s for request in running if request.target_itl_s is not None), default=math.inf)


def prompt_room(costs: CostModel, work: StepWork, cap_s: float, most: int) -> int:
    """Prompt tokens that fit beside `work` into a step of `cap_s`, from MIN_CHUNK to `most`."""
    low, high = min(MIN_CHUNK, most), most
    if cap_s == math.inf:
        return most
    while low < high:  # the cost is monotone in tokens
        middle = (low + high + 1) // 2
        longer = replace(work, tokens=work.tokens + middle, kv_tokens=work.kv_tokens + middle)
        low, high = (middle, high) if costs.predict(longer).total_s <= cap_s else (low, middle - 1)
    return low


def predict_ttft_s(costs: CostModel, ahead: Sequence[int], own: int, decoding: int, chunk: int) -> float:
    """Seconds until a request that arrives now has its first token, if nothing else comes.

    Args:
        ahead: prompt tokens still to forward of each request that goes first.
        own: its own prompt tokens.
        decoding: requests that decode meanwhile, a row in every step each.
        chunk: prompt tokens in a step.
    """
    steps, rest = divmod(sum(ahead) + own, max(1, chunk))
    seconds = steps * costs.predict(StepWork(decoding + chunk, 0, decoding, decoding + 1)).total_s
    if rest:
        seconds += costs.predict(StepWork(decoding + rest, 0, decoding + 1, decoding + 1)).total_s
    return seconds


def check_ttft(target_s: float, predicted_s: float) -> None:
    """Refuses a request that asks for what cannot be had any more.

    Raises:
        OverloadedError: the first token is predicted to come later than the target.
    """
    if predicted_s > target_s:
        raise OverloadedError(
            f"the first token is predicted after {predicted_s * 1e3:.3g} ms, and target_ttft_ms is {target_s * 1e3:.3g}: "
            f"allow more, or try again when less is under way"
        )
