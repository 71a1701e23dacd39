"""Tokenizers out of GGUF files: round trips, special tokens, chat templates, splitting by kind."""

from __future__ import annotations

from typing import Any

import gguf
import pytest

from specdec.errors import ModelError
from specdec.models import load_tokenizer

TEXTS = [
    "Hello world",
    "def f(x):\n    if x > 10:\n\t\treturn x**2  # square\n",
    "naïve 日本語 😀🏽 Ω עברית",
    "12345 3.14159 1e-9",
    "  leading,   inner   and trailing   ",
    "\n\n\n\t\t \r\n",
    "it's we're I'LL",
    "a\u0301 zero\u200bwidth",
    "",
]


def _byte_level(path, pre, merges=(), **flags):
    """Control tokens <eos> and <turn>, plain added token <think>, all bytes, and what the merges make."""
    from tokenizers.pre_tokenizers import ByteLevel

    made = ["".join(merge.split(" ")) for merge in merges]
    tokens = ["<eos>", "<|im_end|>", "<think>", *sorted(ByteLevel.alphabet()), *made]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(flags.get("model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 4] + [1] * (len(tokens) - 3))
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(flags.get("add_bos", False))
    writer.add_chat_template("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}")
    _close(writer)


def _sentencepiece(path, arch="llama", add_space_prefix=True):
    pieces = {"\u2581": -3.0, "a": -4.0, "b": -5.0, "ab": -1.0, "\u2581a": -2.0, "\u2581ab": -0.5}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + list(pieces.values()))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(add_space_prefix)
    _close(writer)
    return tokens


def _close(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tokenizer(path) -> Any:  # a tokenizer of transformers, which is untyped
    return load_tokenizer(str(path))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("pre", ["default", "smollm", "qwen2", "llama-bpe", "tekken"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_survives(pre, text, path):
    _byte_level(path, pre, ["Ġ w", "l l", "Ġ Ġ"])
    tokenizer = _tokenizer(path)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("default", ["a", "12345", "Ġ67"]),
        ("smollm", ["a", "1", "2", "3", "4", "5", "Ġ", "6", "7"]),
        ("qwen2", ["a", "1", "2", "3", "4", "5", "Ġ", "6", "7"]),
        ("llama-bpe", ["a", "123", "45", "Ġ", "67"]),
    ],
)
def test_digits_are_split_as_the_file_says(pre, pieces, path):
    merges = ["1 2", "12 3", "4 5", "123 45", "6 7", "Ġ 67", "Ġ 6"]
    _byte_level(path, pre, merges)
    tokenizer = _tokenizer(path)
    assert tokenizer.tokenize("a12345 67") == pieces


def test_special_tokens_are_one_id_each_and_template_renders(path):
    _byte_level(path, "smollm")
    tokenizer = _tokenizer(path)
    assert tokenizer("x<|im_end|><think>y<eos>").input_ids[1:3] == [1, 2]
    assert tokenizer("<eos>").input_ids == [0]
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == "<think>"  # user-defined tokens are text
    assert tokenizer.eos_token_id == 0
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "[user]hi<|im_end|>"
    assert tokenizer.apply_chat_template(messages, return_dict=False)[-1] == 1


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_added_as_the_file_says(add_bos, path):
    _byte_level(path, "default", add_bos=add_bos)
    tokenizer = _tokenizer(path)
    assert (tokenizer("x").input_ids[0] == 0) == add_bos
    assert tokenizer("x", add_special_tokens=False).input_ids[0] != 0


@pytest.mark.parametrize(("flags", "word"), [({"pre": "unheard"}, "unheard.*smollm"), ({"pre": "default", "model": "bert"}, "bert.*gpt2")])
def test_kinds_that_are_not_known_are_refused_by_name(flags, word, path):
    _byte_level(path, **flags)
    with pytest.raises(ModelError, match=word):
        _tokenizer(path)


def test_sentencepiece_merges_the_best_piece_first(path):
    tokens = _sentencepiece(path)
    tokenizer = _tokenizer(path)
    assert tokenizer.tokenize("ab") == ["\u2581ab"]
    assert tokenizer("ab").input_ids == [1, tokens.index("\u2581ab")]  # BOS, as SentencePiece files have it unless they say not
    assert tokenizer.tokenize("bab") == ["\u2581", "b", "ab"]
    assert tokenizer.tokenize(" ab") == ["\u2581", "\u2581ab"]  # the prefix comes on top of a space that is there


@pytest.mark.parametrize(("arch", "prefix"), [("llama", True), ("llama", False), ("gemma3", False)])
@pytest.mark.parametrize("text", [text for text in TEXTS if text] + ["ab  ab"])
def test_sentencepiece_text_survives_by_bytes(arch, prefix, text, path):
    _sentencepiece(path, arch, prefix)
    tokenizer = _tokenizer(path)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_demo_tokenizer(demo_model):
    tokenizer = _tokenizer(demo_model)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("Hello world 123") == ["Hello", "Ġworld", "Ġ", "1", "2", "3"]
    assert tokenizer("<|im_start|>user<|im_end|>").input_ids == [1, *tokenizer("user").input_ids, 2]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(prompt).input_ids.count(1) == 3
