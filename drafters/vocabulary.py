"""Whether two models' token ids mean the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Protocol

_PADDING = re.compile(r"\[PAD\d+\]|<unused\d+>|<\|?reserved_[\w ]*\d+\|?>", re.ASCII)


class HasVocabulary(Protocol):
    """What is asked of a tokenizer; those of transformers have it."""

    def get_vocab(self) -> Mapping[str, int]: ...


def tokenizer_fingerprint(tokenizer: HasVocabulary | None) -> str | None:
    """Equal for tokenizers whose ids mean the same text; None for none.

    Entries that only fill the table up to a round size do not count, as models of one family are padded differently.
    """
    if tokenizer is None:
        return None
    entries = sorted((index, token) for token, index in tokenizer.get_vocab().items() if not _PADDING.fullmatch(token))
    digest = hashlib.blake2b(digest_size=16)
    for index, token in entries:
        digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
