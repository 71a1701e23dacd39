"""What a preempted request's KV costs to come by again: copied to the host and back, or computed anew."""

from __future__ import annotations

from specdec.kv_manager.swap import SwapOffer
from specdec.scheduler.cost_model import CostModel


def swap_pays(offer: SwapOffer, costs: CostModel, chunk: int, beside: int) -> bool:
    """Whether copying out and back is predicted to take less than computing the tokens again.

    Args:
        chunk: the most prompt tokens in a step.
        beside: token rows that the steps have in any case.
    """
    return offer.seconds < recompute_s(costs, offer.tokens, chunk, beside)


def recompute_s(costs: CostModel, tokens: int, chunk: int, beside: int) -> float:
    """Seconds that forwarding so many tokens, a chunk in a step, adds to steps of `beside` token rows.

    Without rows beside it, the steps are its own.
    """
    alone_s = costs.verify_one_s(beside) if beside else 0.0
    seconds = 0.0
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        seconds += costs.verify_one_s(beside + end - start, end) - alone_s
    return seconds
