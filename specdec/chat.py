"""Conversations to token ids, by the chat template that came with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def has_chat_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether the model came with a chat template."""
    return tokenizer is not None and bool(getattr(tokenizer, "chat_template", None))


def encode_chat(tokenizer: PreTrainedTokenizerBase | None, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation, ready for the answer.

    Raises:
        RequestError: there is no chat template, or it refuses the messages.
    """
    from jinja2 import TemplateError

    if tokenizer is None or not has_chat_template(tokenizer):
        raise RequestError("this model has no chat template: send a plain prompt", param="messages")
    try:
        text = tokenizer.apply_chat_template([dict(message) for message in messages], add_generation_prompt=True, tokenize=False)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from error
    ids: list[int] = tokenizer.encode(str(text), add_special_tokens=False)
    return ids
