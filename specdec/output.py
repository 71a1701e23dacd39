"""Appends a step's accepted tokens to their requests, token by token, and decides which of them is the last.

The earliest event wins: an end token or stop id, then a stop string, then a constraint that is met, then the length. What
lies behind it was never emitted: it is in no count, no KV and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specdec.detokenizer import Detokenizer, StopMatcher
from specdec.plan import Accepted, BatchPlan, Row, RowOutcome
from specdec.request import Request
from specdec.tree import DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IsComplete = Callable[[str, int], bool]
"""(request id, token) -> whether the request's constraint is met by it and nothing more can follow."""


class OutputProcessor:
    """Per-request text state, and the one place where requests grow.

    Args:
        tokenizer: for texts; None where the model has none.
        is_complete: told of every token that does not end its request by itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, is_complete: IsComplete) -> None:
        self._tokenizer = tokenizer
        self._is_complete = is_complete
        self._texts: dict[str, _Text] = {}

    def add(self, request: Request) -> None:
        self._texts[request.id] = _Text(request, self._tokenizer, self._is_complete)

    def holds(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self._texts

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def append(self, plan: BatchPlan, trees: Sequence[DraftTree], accepted: Accepted) -> list[RowOutcome]:
        """Appends what was accepted, cut at the first stop. One outcome per row."""
        return [
            RowOutcome(finish_reason="error", error=accepted.errors[index])
            if index in accepted.errors
            else self._append_row(row, trees[index], accepted, index)
            for index, row in enumerate(plan.rows)
        ]

    def _append_row(self, row: Row, tree: DraftTree, accepted: Accepted, index: int) -> RowOutcome:
        scored = accepted.prompt_logprobs.get(index, ())
        row.request.num_scored += len(scored)
        if not row.emits:
            return RowOutcome(prompt_logprobs=scored)
        path = accepted.nodes[index, : accepted.counts[index]]
        tokens = [*tree.tokens[path].tolist(), int(accepted.next_tokens[index])]
        request, text = row.request, self._texts[row.request.id]
        pieces: list[str] = []
        reason = None
        for token in tokens:
            request.tokens.append(token)
            piece, reason = text.push(request, token)
            pieces.append(piece)
            if reason is not None:
                break
        emitted = tuple(tokens[: len(pieces)])
        return RowOutcome(
            emitted,
            tuple(path[: len(emitted)].tolist()),
            reason,
            tuple(pieces),
            logprobs=accepted.logprobs.get(index, ())[: len(emitted)],
            prompt_logprobs=scored,
        )


class _Text:
    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase | None, is_complete: IsComplete) -> None:
        self._is_complete = is_complete
        self._stop_ids = request.eos_token_ids | set(request.params.stop_token_ids)
        self._detokenizer = Detokenizer(tokenizer, request.tokens) if tokenizer is not None else None
        self._matcher = StopMatcher(request.params.stop)

    def push(self, request: Request, token: int) -> tuple[str, str | None]:
        """The text that a token settles, and the finish reason if it is the last."""
        if token in self._stop_ids:
            return self._matcher.flush(), "stop"
        piece = self._detokenizer.step(token) if self._detokenizer else ""
        settled, stopped = self._matcher.push(piece)
        if stopped:
            return settled, "stop"
        if self._is_complete(request.id, token):
            return settled + self._matcher.flush(), "stop"
        if request.remaining <= 0:
            return settled + self._matcher.flush(), "length"
        return settled, None
