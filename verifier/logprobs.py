"""Log-probabilities: of emitted tokens once a step is decided, and of prompt tokens.

They are the log-softmax of the logits as the model gave them, before any parameter changes them, so they equal those of
a pass over the finished text. Only rows that ask are looked at, and of a draft only the nodes that were accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.plan import BatchPlan, TokenLogprobs
from specdec.tree import DraftTree
from specdec.verifier.base import Decision, RowNodes, StepLogits

_ROWS_AT_ONCE = 32  # prompt positions whose log-softmax stands in memory together


def score(logits: Tensor, tokens: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities at some positions.

    Args:
        logits: float32 [n, vocabulary], raw.
        tokens: n ids.
        num_top: the most probable ids to tell beside; the lower id first where they are equally probable.
    """
    scores = torch.log_softmax(logits, dim=-1)
    own: list[float] = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None]).squeeze(1).tolist()
    tops = [_top(row, min(num_top, scores.shape[1])) for row in scores] if num_top else [()] * len(tokens)
    return tuple(TokenLogprobs(token, value, top) for token, value, top in zip(tokens, own, tops, strict=True))


def _top(scores: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    values, ids = torch.topk(scores, min(count + 1, len(scores)))
    if len(values) > count and values[count] == values[count - 1]:
        ids = (scores >= values[count]).nonzero().squeeze(1)  # more than one id could be the last: have them all
        values = scores[ids]
    best = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(best[:count])


def wanted_rows(rows: Sequence[RowNodes]) -> list[int]:
    """The logit rows whose raw values may be scored."""
    return [index for row in rows if row.request.params.logprobs is not None for index in range(row.start, row.start + row.count)]


def emitted_logprobs(
    rows: Sequence[RowNodes], decisions: Mapping[int, Decision], logits: StepLogits
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Plan row -> one entry per accepted node and one for the next token, for rows that asked and chose a token."""
    found = {}
    for row in rows:
        decision = decisions.get(row.index)
        if row.request.params.logprobs is None or decision is None or decision.token < 0:
            continue
        chosen_at = [row.start, *(row.start + 1 + node for node in decision.path)]
        tokens = [*row.tree.tokens[list(decision.path)].tolist(), decision.token]
        found[row.index] = score(logits.raw(chosen_at), tokens, row.request.params.logprobs)
    return found


def prompt_logprobs(plan: BatchPlan, trees: Sequence[DraftTree], logits: Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Plan row -> one entry per prompt token that this step scores for the first time, for rows that asked.

    Args:
        plan: the step's rows; the logits of a pending token at position i score the prompt token at i + 1.
        trees: one per row.
        logits: float32 [R, vocabulary] of the step; prompt positions are not changed by transforms.
    """
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    if not any(row.scores_prompt for row in plan.rows):
        return found
    start = 0
    for index, (row, tree) in enumerate(zip(plan.rows, trees, strict=True)):
        count = row.num_logits(len(tree))
        if row.scores_prompt:
            request = row.request
            first = max(row.cached + 1, request.num_scored)
            end = min(row.cached + row.pending + 1, request.num_prompt)
            entries: list[TokenLogprobs] = []
            for low in range(first, end, _ROWS_AT_ONCE):
                high = min(low + _ROWS_AT_ONCE, end)
                place = start + low - 1 - row.cached
                entries += score(logits[place : place + high - low], request.tokens[low:high], request.params.prompt_logprobs or 0)
            found[index] = tuple(entries)
        start += count
    return found
