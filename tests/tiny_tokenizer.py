"""A byte-level tokenizer of 512 tokens for F-TINY: two special ones, every byte, pairs of digits and pairs of letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

END, THINK = 0, 1


def tiny_tokenizer(end: str | None = "<end>") -> Any:  # a tokenizer of transformers, which is untyped
    """Ids: `<end>`, `<think>`, 256 bytes, "00" to "99", then "aa", "ab", ... up to 512. With `end` None no token ends a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [f"{a}{b}" for a in "0123456789" for b in "0123456789"]
    pairs += [f"{a}{b}" for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"]
    words = ["<end>", "<think>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *pairs][:512]
    merges = [(word[0], word[1]) for word in words[258:]]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:2]])
    special = {"eos_token": end} if end is not None else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def save_tiny_tokenizer(folder: Path, end: str | None = "<end>") -> Path:
    """Beside the weights of a model folder."""
    tiny_tokenizer(end).save_pretrained(folder)
    return folder
