"""Values that pass between scheduler, drafters, verifier, KV manager and engine in one step. No torch.

A row forwards `pending` committed tokens whose KV is missing, at least one, then the nodes of its draft:

    committed tokens   |t0 t1 t2 ... t(c-1)|t(c) ... t(L-1)|n0 n1 n2 ...|
                       |<---- cached ----->|<-- pending -->|<- nodes -->|      L = cached + pending when it emits

A prefill chunk is many pending and no nodes, plain decoding 1 + 0, a chain 1 + k, a tree 1 + n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.request import Request, RequestStats


@dataclass(frozen=True)
class DraftNeeds:
    """What a drafter asks of the engine, as data: nobody asks which drafter it holds.

    Attributes:
        hidden_layers: target layers whose output hidden states `observe` must be given.
        q: the drafter returns the distribution of each node, which opens the `rejection` and `traversal` rules.
        kv: the drafter keeps KV of its own under the request's block table.
    """

    hidden_layers: tuple[int, ...] = ()
    q: bool = False
    kv: bool = False


@dataclass(frozen=True)
class Row:
    """One request's share of a step.

    Attributes:
        cached: committed tokens whose target KV is in the pool.
        pending: committed tokens to forward now, at least 1.
        draft_limit: the most draft nodes, 0 for none.
        depth_limit: the deepest node that can still be emitted before the last token allowed.
        drafter: drafter spec string: the request's, or the part of it that drafts in this step.
        catch_up: per part of `drafter`, committed tokens that it has to read before it drafts; empty where none keeps KV.
        length: committed tokens when the row was planned; the request grows when the step commits.
    """

    request: Request
    cached: int
    pending: int
    draft_limit: int = 0
    depth_limit: int = 0
    drafter: str = "off"
    catch_up: tuple[int, ...] = ()
    length: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", len(self.request.tokens))

    @property
    def emits(self) -> bool:
        """Whether this step reaches the end of the committed tokens, so that new ones are chosen."""
        return self.cached + self.pending == self.length

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of its pending tokens score prompt tokens that the request wants scored."""
        request = self.request
        return (
            request.params.prompt_logprobs is not None and request.num_scored < request.num_prompt and self.cached < request.num_prompt - 1
        )

    def num_logits(self, num_nodes: int) -> int:
        """Logit rows of this row: those of its last tokens, so that the root and the nodes always come last."""
        if self.scores_prompt:
            return self.pending + num_nodes
        return 1 + num_nodes if self.emits else 0

    @property
    def decodes(self) -> bool:
        """Whether this is a decoding row: one pending token past the prompt. Only these count as verifies."""
        return self.pending == 1 and self.emits and self.length > self.request.num_prompt


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step, by what they were spent on.

    Attributes:
        draft_s: by drafter name.
        verify_s: packing, upload and the target forward.
        sample_s: logits to choices, and the walk.
        commit_s: KV compaction and prefix-cache upkeep.
        host_s: all the rest.
    """

    draft_s: Mapping[str, float] = field(default_factory=dict)
    verify_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0
    host_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self.draft_s.values()) + self.verify_s + self.sample_s + self.commit_s + self.host_s


@dataclass(frozen=True)
class BatchPlan:
    """Who runs in this step, and what it is predicted to cost (None until it is known which nodes are verified)."""

    rows: tuple[Row, ...]
    predicted: StepCost | None = None

    @property
    def num_tokens(self) -> int:
        """Token rows forwarded if every row drafts to its limit."""
        return sum(row.pending + row.draft_limit for row in self.rows)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the target at one position, before any transform: log-softmax of its raw logits.

    Attributes:
        token: the token at the position.
        logprob: of that token.
        top: the most probable ids and theirs, best first; as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Accepted:
    """What the verifier chose, per plan row.

    Attributes:
        paths: the accepted path of each row, as draft-node indices from the root down.
        next_tokens: of each row the correction or bonus token; -1 where the row does not emit.
        errors: row index -> why no token could be chosen there.
        logprobs: row index -> one entry per accepted node and one for the next token; only for rows that asked.
        prompt_logprobs: row index -> one entry per prompt token that this step's logits score; only for rows that asked.
    """

    paths: Sequence[tuple[int, ...]]
    next_tokens: Sequence[int]
    errors: Mapping[int, str] = field(default_factory=dict)
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class RowOutcome:
    """What one row really delivered, after stops were applied token by token.

    Attributes:
        emitted: ids appended to the request, in order.
        path: the accepted draft nodes among them, as node indices; the first `len(path)` of `emitted`.
        finish_reason: `stop`, `length`, `error` or None.
        text: text of each emitted token as far as it is settled; a held-back piece comes with a later token.
        error: why the row failed, with finish_reason `error`.
        logprobs: one entry per emitted token, where asked for.
        prompt_logprobs: entries for prompt tokens that were scored in this step, where asked for.
    """

    emitted: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    finish_reason: str | None = None
    text: tuple[str, ...] = ()
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Event:
    """News of one request, as the engine's caller sees it.

    Attributes:
        token_ids: ids emitted in this step.
        pieces: text of each id; joined over all events they are the request's text.
        num_accepted: the first so many of `token_ids` were accepted draft tokens.
        finish_reason: `stop`, `length`, `abort`, `error`, or None while it runs.
        error: what went wrong, with finish_reason `error`.
        stats: the request's counters; shared with the engine until `finish_reason` is set.
        logprobs: one entry per id, where asked for.
        prompt_logprobs: entries for the prompt tokens from the second on, in order over the events, where asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    num_accepted: int
    stats: RequestStats
    finish_reason: str | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Hidden = Any  # dict[int, torch.Tensor]: layer -> [rows, hidden]; this module must not import torch
