"""From the parameters of a request to those of each of its choices, and from finished choices to the best. No engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specdec.errors import RequestError
from specdec.plan import TokenLogprobs
from specdec.request import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def choice_params(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each choice: all score what they emit where the best are wanted, and only the first its prompt."""
    if params.num_choices > params.n and params.logprobs is None:
        params = replace(params, logprobs=0)
    others = replace(params, prompt_logprobs=None) if params.prompt_logprobs is not None else params
    return [params, *[others] * (params.num_choices - 1)]


def best_choices(logprobs: Sequence[Sequence[TokenLogprobs]], n: int) -> list[int]:
    """Indices of the `n` choices of highest mean logprob, best first; the earlier one of equals.

    Args:
        logprobs: of the emitted tokens of each choice; one that emitted none comes last.
        n: how many.
    """
    means = [sum(entry.logprob for entry in entries) / len(entries) if entries else float("-inf") for entries in logprobs]
    return sorted(range(len(means)), key=lambda index: -means[index])[:n]


def bad_word_ids(words: Sequence[str | tuple[int, ...]], tokenizer: PreTrainedTokenizerBase | None) -> tuple[tuple[int, ...], ...]:
    """`SamplingParams.bad_words` as id sequences: a text is taken as written and with a space before it.

    Raises:
        RequestError: there are texts among them, and the model has no tokenizer.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[word] = None
            continue
        if tokenizer is None:
            raise RequestError("bad_words as texts need a tokenizer, and this model has none: give token ids", param="bad_words")
        for text in (word, f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return tuple(found)


def check_ids(params: SamplingParams, bad_words: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuses parameters that name token ids outside the vocabulary, with the field's name."""
    fields = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "bad_words": [token for word in bad_words for token in word],
    }
    for name, ids in fields.items():
        bad = next((token for token in ids if token >= vocab_size), None)
        if bad is not None:
            raise RequestError(f"{name} holds token id {bad}, but ids must lie in [0, {vocab_size})", param=name)
