"""Tokens to text as they come, and stop strings. Text is settled token by token, whatever the block they arrived in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 8
"""Prompt tokens that the decoder sees first, so that a leading space survives where the tokenizer merges it."""


class Detokenizer:
    """Text of one request. Bytes of an unfinished character are held back; special tokens have no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(ids=list(prompt[-CONTEXT:]), skip_special_tokens=True)

    def steps(self, tokens: Sequence[int]) -> list[str]:
        """The text that each of `tokens` settles, possibly none."""
        step, tokenizer = self._stream.step, self._tokenizer
        return [step(tokenizer, token) or "" for token in tokens]


class StopMatcher:
    """Finds the first stop string in a stream of text, holding back what may yet become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Adds text; returns what is settled, and whether a stop string was completed (its text is dropped)."""
        if not self._stops:
            return text, False
        held = self._held + text
        found = [position for stop in self._stops if (position := held.find(stop)) >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """The text still held back, once nothing more can come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
