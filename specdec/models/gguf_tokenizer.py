"""A tokenizer out of a GGUF file's vocabulary, merges and special tokens.

Two kinds: byte-level BPE (`gpt2`), whose way of splitting text before merging is named by `tokenizer.ggml.pre`, and SentencePiece BPE
(`llama`), whose merges follow from the vocabulary and its scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.errors import ModelError
from specdec.models.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_GPT2 = ("default", "gpt-2", "")  # the split that ByteLevel does itself
_DIGITS_THEN_GPT2 = ("smollm", "refact", "command-r", "starcoder", "codeshell")  # every digit is a piece

# How models end a turn or a text, among the control tokens. A file names one of them as its end; the others end it as well.
_END_TOKENS = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<eos>", "</s>", "<|end|>", "<EOT>")
)


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer, with chat template and special tokens. Raises ModelError for one of an unknown kind."""
    from transformers import PreTrainedTokenizerFast

    tokens = _tokens(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens)
    else:
        raise ModelError(f"{file.path}: tokenizer kind {kind!r} is not supported; supported: gpt2, llama")
    _add_special_tokens(tokenizer, file, tokens)
    special = {name: tokens[index] for name, index in _special_ids(file).items()}
    template = file.metadata.get("tokenizer.chat_template")
    add_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")) and "bos_token" in special
    if add_bos:
        _add_bos(tokenizer, special["bos_token"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **special)


def gguf_eos_ids(file: GgufFile) -> frozenset[int]:
    """Ids that end a text: those the file names, and control tokens known to end a turn."""
    metadata = file.metadata
    keys = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")]
    named = frozenset(int(metadata[key]) for key in keys if metadata.get(key) is not None)
    types = metadata.get("tokenizer.ggml.token_type") or ()
    ends = {index for index, token in enumerate(metadata.get("tokenizer.ggml.tokens") or ()) if token in _END_TOKENS}
    return named | frozenset(index for index in ends if index < len(types) and types[index] == _CONTROL)


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.path}: metadata key tokenizer.ggml.tokens is missing")
    return list(tokens)


def _special_ids(file: GgufFile) -> dict[str, int]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: int(index) for name, index in found.items() if index is not None and index < len(_tokens(file))}


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if pre in _GPT2:
        splitter: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _DIGITS_THEN_GPT2:
        splitter = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in _SPLITS:
        splitter = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        known = ", ".join(sorted({*_GPT2, *_DIGITS_THEN_GPT2, *_SPLITS} - {""}))
        raise ModelError(f"{file.path}: pre-tokenizer {pre!r} is not supported; supported: {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges", ())]
    # Llama 3 pieces that are tokens as they stand are not merged up to: their merges are not all there
    model = models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=_SPLITS.get(pre) == _LLAMA3)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    gemma = file.architecture.startswith("gemma")
    if gemma:  # runs of spaces stand as such in Gemma files
        tokens = ["\u2581" * len(token) if token.isspace() and token.strip(" ") == "" else token for token in tokens]
        rank = [-float(index) for index in range(len(tokens))]  # its scores do not follow the order of merging, ids do
    else:
        rank = [float(score) for score in file.metadata.get("tokenizer.ggml.scores") or ()]
        if len(rank) != len(tokens):
            raise ModelError(f"{file.path}: tokenizer.ggml.scores must hold {len(tokens)} numbers, got {len(rank)}")
    unknown = _special_ids(file).get("unk_token")
    vocabulary = _vocabulary(tokens)
    model = models.BPE(
        vocab=vocabulary,
        merges=_implied_merges(vocabulary, rank),
        fuse_unk=True,
        byte_fallback=True,
        unk_token=None if unknown is None else tokens[unknown],
    )
    tokenizer = Tokenizer(model)
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
        to_marks: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []  # before each stretch of text, as llama.cpp does
        tokenizer.normalizer = normalizers.Sequence([*to_marks, normalizers.Replace(" ", "\u2581")])
        steps += [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _implied_merges(vocabulary: dict[str, int], rank: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best tokens first."""
    found = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-rank[index], left, right, cut, token))
    found.sort()
    return [(token[:cut], token[cut:]) for _, _, _, cut, token in found]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Token to id; of tokens that stand twice, as padding does, the first."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _add_special_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    """Control tokens become special, user-defined ones plain added tokens: both are found whole in the text."""
    from tokenizers import AddedToken

    types = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    named = set(_special_ids(file).values())
    pairs = list(enumerate(zip(tokens, types, strict=True)))
    special = [AddedToken(t, normalized=False, special=True) for index, (t, kind) in pairs if kind == _CONTROL or index in named]
    plain = [AddedToken(t, normalized=False) for index, (t, kind) in pairs if kind == _USER_DEFINED and index not in named]
    tokenizer.add_special_tokens([token for token in special if tokenizer.token_to_id(token.content) is not None])
    tokenizer.add_tokens([token for token in plain if tokenizer.token_to_id(token.content) is not None])


def _add_bos(tokenizer: Tokenizer, bos: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
