"""Log-probabilities in OpenAI's two forms, and the text of single tokens that they name. Knows nothing of HTTP."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any  # JSON objects are open

from specdec.plan import TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEAST = -9999.0  # OpenAI's way to say -inf, which JSON cannot
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Bytes and text of single tokens, which need not be whole characters.

    Args:
        tokenizer: None for a model without one; its tokens are named by their ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _added(self) -> dict[int, tuple[str, bool]]:
        """Ids of tokens beside the vocabulary proper -> their text, and whether they are left out of texts."""
        added = {} if self._tokenizer is None else self._tokenizer.added_tokens_decoder
        return {token: (str(one.content), bool(one.special)) for token, one in added.items()}

    @cached_property
    def _byte_level(self) -> bool:
        return self._tokenizer is not None and b'"ByteLevel"' in self._tokenizer.backend_tokenizer.decoder.__getstate__()

    def raw(self, token: int) -> bytes:
        """What the token stands for."""
        if token in self._added:
            return self._added[token][0].encode()
        name = None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return f"token_id:{token}".encode()
        if self._byte_level:
            return b"".join(_byte_of().get(char, char.encode()) for char in name)
        single = _BYTE.fullmatch(name)
        return bytes([int(single[1], 16)]) if single else str(name).replace("\u2581", " ").encode()

    def text(self, token: int) -> str:
        """The token's bytes as text; part of a character as OpenAI writes it, `bytes:\\xe4\\xb8`."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def shown(self, token: int) -> bytes:
        """What the token adds to a returned text: nothing where it is a special one, or the model has no tokenizer."""
        special = self._tokenizer is None or (token in self._added and self._added[token][1])
        return b"" if special else self.raw(token)


@cache
def _byte_of() -> dict[str, bytes]:
    """GPT-2's printable stand-in of each byte -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {**{byte: byte for byte in printable}, **{byte: 256 + index for index, byte in enumerate(others)}}
    return {chr(code): bytes([byte]) for byte, code in codes.items()}


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """The `logprobs` object of a chat choice or chunk."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": max(logprob, _LEAST), "bytes": list(texts.raw(token))}

    content = [{**one(entry.token, entry.logprob), "top_logprobs": [one(*top) for top in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Writes the `logprobs` objects of one text completion, chunk after chunk: `text_offset` goes on counting."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The object for some tokens: their logprobs, or null for a first prompt token, which has none.

        `top_logprobs` holds as many as were asked for, and the token itself.
        """
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._texts.shown(token)))
        return {
            "tokens": [self._texts.text(token) for token in tokens],
            "token_logprobs": [None if entry is None else max(entry.logprob, _LEAST) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = {**dict(entry.top), entry.token: entry.logprob}
        return {self._texts.text(token): max(logprob, _LEAST) for token, logprob in top.items()}


def empty_completion_logprobs() -> dict[str, Any]:
    """The object for no tokens."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
