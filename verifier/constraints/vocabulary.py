"""A model's tokenizer as llguidance needs it, and token masks: one bit per id, in 32-bit words.

Building it takes a second or so for a large vocabulary, and the interpreter is held meanwhile: do it before serving.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specdec.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase

Mask = NDArray[np.uint32]
"""Bit `id % 32` of word `id // 32` says whether a token is allowed."""

_NO_END = "<|no end token|>"


class Vocabulary:
    """The tokens of a model.

    Args:
        tokenizer: a fast tokenizer, whose decoder says how ids become bytes.
        vocab_size: of the model; it may be larger than the tokenizer's, and padding ids are never allowed.
        end_ids: the model's end tokens; may be empty.

    Attributes:
        tokens: for llguidance.
        num_words: of a mask.

    Raises:
        RequestError: the tokenizer is of a kind that constraints do not work with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError(f"a constraint needs a fast tokenizer, and {type(tokenizer).__name__} is none", param="constraint")
        self.tokens = self._build(backend.to_str(), backend.get_vocab_size())
        self.num_words = -(-self.tokens.vocab_size // 32)
        self.all: Mask = self.mask_of(range(vocab_size))
        self.no_end: Mask = ~self.mask_of(self.tokens.eos_tokens)

    def _build(self, text: str, size: int) -> LLTokenizer:
        """llguidance has to have an end token: a model without one is given one beyond its vocabulary, which no mask shows."""
        from llguidance import LLTokenizer

        ends = sorted(self.end_ids)
        if not ends:
            size = max(size, self.vocab_size)
            text = _with_token(text, size)
            ends, size = [size], size + 1
        try:
            # general slices of the vocabulary: what makes masks of free text cheap
            return LLTokenizer(text, n_vocab=max(size, self.vocab_size), eos_token=ends)
        except ValueError as error:
            raise RequestError(f"constraints do not work with this model's tokenizer: {error}", param="constraint") from None

    def mask_of(self, ids: Iterable[int]) -> Mask:
        """A mask with the bits of `ids` set."""
        mask = np.zeros(self.num_words, dtype=np.uint32)
        index = np.fromiter(ids, dtype=np.int64)
        np.bitwise_or.at(mask, index >> 5, np.uint32(1) << (index & 31).astype(np.uint32))
        return mask

    def bytes_of(self, token: int) -> bytes:
        """The text of a token, special ones included."""
        return self.tokens.decode_bytes([token])

    @cached_property
    def texts(self) -> list[bytes]:
        """`bytes_of` all ids below `vocab_size`."""
        return [self.tokens.decode_bytes([token]) for token in range(self.vocab_size)]

    def tokenize(self, text: bytes) -> list[int]:
        return self.tokens.tokenize_bytes(text) if text else []


def _with_token(text: str, token: int) -> str:
    """A serialized tokenizer with one more special token."""
    values: dict[str, Any] = json.loads(text)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    values["added_tokens"].append({"id": token, "content": _NO_END, "special": True, **flags})
    return json.dumps(values)
