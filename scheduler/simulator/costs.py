"""What a step costs in the simulation: forwards from a roofline or from measured times, drafters beside them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.scheduler.simulator.roofline import Load


class ForwardCost(Protocol):
    """Seconds of one forward of a model."""

    def seconds(self, load: Load) -> float: ...


@dataclass(frozen=True)
class MeasuredForward:
    """Times of forwards by their token rows; between those measured on a straight line, beyond the last by `token_s`.

    Attributes:
        rows: token rows, ascending, from 1.
        times_s: seconds of each.
        context: tokens in the KV pool that each measured row's request had.
        token_s: per token row beyond the last measured size, as prefill shows it.
        pair_s: per attended pair of tokens beyond those of the measured context.
        kv_token_s: per token of the KV pool read.
    """

    rows: Sequence[int]
    times_s: Sequence[float]
    context: int
    token_s: float
    pair_s: float = 0.0
    kv_token_s: float = 0.0

    def seconds(self, load: Load) -> float:
        attended_s = max(0, load.pairs - load.tokens * self.context) * self.pair_s
        return self._rows_s(load.tokens) + attended_s + load.kv_tokens * self.kv_token_s

    def _rows_s(self, tokens: int) -> float:
        if tokens >= self.rows[-1]:
            return self.times_s[-1] + (tokens - self.rows[-1]) * self.token_s
        high = bisect_left(self.rows, tokens)
        if self.rows[high] == tokens:
            return self.times_s[high]
        left, right = self.rows[high - 1], self.rows[high]
        share = (tokens - left) / (right - left)
        return self.times_s[high - 1] + share * (self.times_s[high] - self.times_s[high - 1])


@dataclass(frozen=True)
class DraftCost:
    """Seconds of drafting for one batch.

    Attributes:
        limit: the most nodes that the drafter proposes per request and step.
        model: the drafter's own forward, one per depth; None where it needs none, such as an n-gram table.
        call_s, row_s: fixed seconds of a step with drafts, and of each row of it.
    """

    limit: int
    model: ForwardCost | None = None
    call_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, rows: int, depth: int, catch_up: int, kv_tokens: int) -> float:
        """Of drafting `depth` deep for `rows` requests.

        Args:
            rows: requests that draft.
            depth: of the deepest draft.
            catch_up: committed tokens whose KV the drafter does not have yet, all rows together; they go with its first forward.
            kv_tokens: tokens of KV that the rows have in the drafter's storage.
        """
        fixed = self.call_s + rows * self.row_s
        if self.model is None or depth == 0:
            return fixed
        first = self.model.seconds(Load(catch_up, kv_tokens, catch_up * kv_tokens // rows, rows))
        later = self.model.seconds(Load(rows, kv_tokens, kv_tokens, rows)) if depth > 1 else 0.0
        return fixed + first + (depth - 1) * later


@dataclass(frozen=True)
class HostCost:
    """Seconds of a step outside forwards and drafters: fixed, and per row of the plan or of logits.

    Attributes:
        step_s, row_s: planning, bookkeeping, packing.
        sample_s, sample_row_s: logits to choices.
        commit_row_s: page tables and prefix cache.
    """

    step_s: float = 0.0
    row_s: float = 0.0
    sample_s: float = 0.0
    sample_row_s: float = 0.0
    commit_row_s: float = 0.0
