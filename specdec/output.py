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
        is_complete: told of every token of a constrained request that does not end it by itself.
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
        request = row.request
        scored = accepted.prompt_logprobs.get(index, ())
        request.num_scored += len(scored)
        if not row.emits:
            return RowOutcome(prompt_logprobs=scored)
        path = accepted.paths[index]
        nodes = tree.tokens.tolist()
        tokens = (*[nodes[node] for node in path], accepted.next_tokens[index])
        pieces, reason = self._texts[request.id].push(tokens)
        emitted = tokens[: len(pieces)]
        request.tokens.extend(emitted)
        return RowOutcome(
            emitted,
            path[: len(emitted)],
            reason,
            tuple(pieces),
            logprobs=accepted.logprobs.get(index, ())[: len(emitted)],
            prompt_logprobs=scored,
        )


class _Text:
    """One request's text, and where it ends. Most requests end by an id or by their length, which needs no look at each piece."""

    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase | None, is_complete: IsComplete) -> None:
        self._request = request
        self._is_complete = is_complete if request.params.constraint is not None else None
        self._stop_ids = request.eos_token_ids | set(request.params.stop_token_ids)
        self._detokenizer = Detokenizer(tokenizer, request.tokens) if tokenizer is not None else None
        self._matcher = StopMatcher(request.params.stop) if request.params.stop else None

    def push(self, tokens: Sequence[int]) -> tuple[list[str], str | None]:
        """Takes in a block of tokens up to the first that ends the request.

        Returns:
            For each token taken in the text that it settles, and the finish reason if the last of them ends the request.
        """
        left = self._request.remaining
        spoken, reason = tokens[:left], "length" if len(tokens) >= left else None
        if not self._stop_ids.isdisjoint(spoken):
            spoken, reason = spoken[: next(place for place, token in enumerate(spoken) if token in self._stop_ids)], "stop"
        pieces = self._detokenizer.steps(spoken) if self._detokenizer is not None else [""] * len(spoken)
        stops_at = self._find_end(spoken, pieces)
        if stops_at is not None:
            del pieces[stops_at + 1 :]
            reason = "stop"
        elif reason == "stop":
            pieces.append("")  # of the stop id
        if reason is not None and self._matcher is not None:
            pieces[-1] += self._matcher.flush()
        return pieces, reason

    def _find_end(self, tokens: Sequence[int], pieces: list[str]) -> int | None:
        """The first place where a stop string or the constraint is met; holds back in `pieces` what may yet become a stop string."""
        if self._matcher is None and self._is_complete is None:
            return None
        for place, token in enumerate(tokens):
            stopped = False
            if self._matcher is not None:
                pieces[place], stopped = self._matcher.push(pieces[place])
            if stopped or (self._is_complete is not None and self._is_complete(self._request.id, token)):
                return place
        return None
