"""Sampling parameters and logprobs over HTTP in OpenAI's form, against a tiny model whose tokens are bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specdec.llm import LLM
from specdec.request import SamplingParams
from specdec.server.logprobs import TokenTexts
from specdec.server.options import ServerOptions
from specdec.testing import write_tiny_checkpoint

END = 511
PROMPT = "Grüße, 世界!"  # one byte a token
TEXT: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 5}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0.8, "seed": 5}


def write_byte_tokenizer(folder: Path) -> None:
    """256 tokens that are one byte each, words that fill the vocabulary up, and a special end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: token for token, name in enumerate([*alphabet, *(f"Ġw{token}" for token in range(256, END)), "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}:"
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    """The same model without HTTP and without drafts: what every answer must equal."""
    return LLM(str(model), dtype="float32", num_pages=256)


@pytest.fixture(scope="module")
def http(model: Path, serving: Any) -> Iterator[httpx.Client]:
    engine = LLM(str(model), drafter="ngram(min=1)", dtype="float32", num_pages=256, check_invariants=True).engine
    with serving(engine, ServerOptions(port=0, served_model_name="tiny")) as (client, _):
        yield client


@pytest.fixture
def api(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=str(http.base_url.join("/v1")), api_key="none", max_retries=0) as api:
        yield api


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        data = [line[6:] for line in response.iter_lines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def ids_of(logprobs: dict[str, Any], texts: TokenTexts) -> list[int]:
    """Ids by the texts of the tokens, which are unique in this vocabulary."""
    names = {texts.text(token): token for token in range(512)}
    return [names[token] for token in logprobs["tokens"]]


@pytest.mark.parametrize(
    "parameters",
    [
        {"repetition_penalty": 4.0},
        {"presence_penalty": -1.5, "frequency_penalty": -0.5},
        {"logit_bias": {"65": 9, "66": 9.5}},
        {"bad_words": ["a", "w300"], "logit_bias": {"300": 100, "64": 50}},
        {"bad_words": [[65, 66], [66]], "logit_bias": {"65": 9, "66": 9}},
        {"allowed_token_ids": [65, 66, 67]},
        {"min_tokens": 6, "stop_token_ids": list(range(0, 512, 3))},
        {"logit_bias": {str(END): 100}, "ignore_eos": True},
        {"logit_bias": {str(END): 100}, "min_tokens": 4},
        {"typical_p": 0.5},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids="+".join,
)
def test_parameters_reach_the_engine(http: httpx.Client, llm: LLM, parameters: dict[str, Any]) -> None:
    answer = ask(http, "/v1/completions", {**TEXT, **parameters, "logprobs": 0})
    bias = {int(token): addend for token, addend in parameters.get("logit_bias", {}).items()}
    options = {**parameters, "logit_bias": bias, "max_tokens": 12, "temperature": 0.8, "seed": 5}
    expected = llm.generate([PROMPT], SamplingParams.from_dict(options))[0]
    assert ids_of(answer["choices"][0]["logprobs"], TokenTexts(llm.engine.tokenizer)) == list(expected.token_ids)
    assert answer["choices"][0]["text"] == expected.text
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason
    plain = llm.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0.8, seed=5))[0]
    assert expected.token_ids != plain.token_ids


def test_completion_logprobs(http: httpx.Client, llm: LLM) -> None:
    answer = ask(http, "/v1/completions", {**TEXT, "logprobs": 2})
    choice = llm.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0.8, seed=5, logprobs=2))[0].choices[0]
    assert choice.logprobs is not None
    texts = TokenTexts(llm.engine.tokenizer)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [texts.text(entry.token) for entry in choice.logprobs]
    assert logprobs["token_logprobs"] == [entry.logprob for entry in choice.logprobs]
    for top, entry in zip(logprobs["top_logprobs"], choice.logprobs, strict=True):
        assert top == {texts.text(token): value for token, value in (*entry.top, (entry.token, entry.logprob))}
        assert list(top)[:2] == [texts.text(token) for token, _ in entry.top]
    text = answer["choices"][0]["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo_scores_the_prompt(http: httpx.Client, llm: LLM, n: int, max_tokens: int) -> None:
    body = {**TEXT, "echo": True, "logprobs": 1, "n": n, "max_tokens": max_tokens, "prompt": [PROMPT, "b"]}
    answer = ask(http, "/v1/completions", body)
    params = SamplingParams(max_tokens=max_tokens or 1, temperature=0.8, seed=5, logprobs=1, prompt_logprobs=1, n=n)
    outputs = llm.generate([PROMPT, "b"], params)
    texts = TokenTexts(llm.engine.tokenizer)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * n))
    for choice in answer["choices"]:
        output = outputs[choice["index"] // n]
        own = output.choices[choice["index"] % n]
        assert output.prompt_logprobs is not None and own.logprobs is not None
        entries = [*output.prompt_logprobs, *own.logprobs[:max_tokens]]
        assert choice["text"] == [PROMPT, "b"][choice["index"] // n] + (own.text if max_tokens else "")
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None if entry is None else entry.logprob for entry in entries]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(entries)
        assert logprobs["tokens"][1:] == [texts.text(entry.token) for entry in entries[1:] if entry is not None]
        if output is outputs[0]:
            assert logprobs["tokens"][:5] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc", "bytes:\\xc3"]
            assert logprobs["text_offset"][:6] == [0, 1, 2, 2, 3, 3]
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(PROMPT.encode()) + 1
    assert answer["usage"]["completion_tokens"] == 2 * n * max_tokens


@pytest.mark.parametrize(
    "body", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}, {"n": 2, "echo": True}, {"logprobs": None, "echo": True}]
)
def test_streamed_completions_carry_the_same(http: httpx.Client, body: dict[str, Any]) -> None:
    body = {**TEXT, "logprobs": 1, "prompt": [PROMPT, "b"], **body}
    whole = ask(http, "/v1/completions", body)
    *chunks, last = chunks_of(http, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert [chunk["finish_reason"] for chunk in mine if chunk["finish_reason"]] == [choice["finish_reason"]]
        parts = [chunk["logprobs"] for chunk in mine if chunk["logprobs"] is not None]
        if body["logprobs"] is None:
            assert parts == [] and choice["logprobs"] is None
        else:
            assert {name: [item for part in parts for item in part[name]] for name in choice["logprobs"]} == choice["logprobs"]


def test_chat_logprobs(http: httpx.Client, llm: LLM) -> None:
    answer = ask(http, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3})
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, logprobs=3)
    choice = llm.generate(["hi:"], params)[0].choices[0]
    assert choice.logprobs is not None
    texts = TokenTexts(llm.engine.tokenizer)
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": texts.text(entry.token),
                "logprob": entry.logprob,
                "bytes": list(texts.raw(entry.token)),
                "top_logprobs": [
                    {"token": texts.text(token), "logprob": value, "bytes": list(texts.raw(token))} for token, value in entry.top
                ],
            }
            for entry in choice.logprobs
        ],
        "refusal": None,
    }
    chunks = chunks_of(http, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3})
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"] is not None]
    assert [entry for part in parts for entry in part["content"]] == answer["choices"][0]["logprobs"]["content"]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == answer["choices"][0]["message"]["content"]
    alone = ask(http, "/v1/chat/completions", {**CHAT, "logprobs": True})["choices"][0]["logprobs"]
    assert all(entry["top_logprobs"] == [] for entry in alone["content"])


def test_a_stop_token_is_scored_and_shown_nowhere(http: httpx.Client) -> None:
    answer = ask(http, "/v1/completions", {**TEXT, "logit_bias": {str(END): 100}, "min_tokens": 2, "logprobs": 0})
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][-1] == "<end>"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 3
    assert "<end>" not in choice["text"]


def test_best_of(http: httpx.Client, llm: LLM) -> None:
    answer = ask(http, "/v1/completions", {**TEXT, "n": 2, "best_of": 4, "prompt": [PROMPT, "b"]})
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, n=2, best_of=4)
    expected = [choice.text for output in llm.generate([PROMPT, "b"], params) for choice in output.choices]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 12
    same = ask(http, "/v1/completions", {**TEXT, "n": 2, "best_of": 2})
    assert [choice["text"] for choice in same["choices"]] == [
        choice["text"] for choice in ask(http, "/v1/completions", {**TEXT, "n": 2})["choices"]
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"bad_words": [[512]]}, "bad_words"),
        ({"allowed_token_ids": [65], "bad_words": [[65]]}, None),
    ],
)
def test_what_cannot_be_is_a_400(http: httpx.Client, fields: dict[str, Any], param: str | None) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        response = http.post(path, json={**body, **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


def test_the_openai_client_reads_them(api: openai.OpenAI) -> None:
    messages: list[Any] = CHAT["messages"]
    chat = api.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, logprobs=True, top_logprobs=2, presence_penalty=0.5, logit_bias={"65": 5}
    )
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [2] * 4
    text = api.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, logprobs=2, echo=True, frequency_penalty=1.0, best_of=1)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert text.usage is not None
    assert len(logprobs.tokens) == len(PROMPT.encode()) + text.usage.completion_tokens


def test_tokens_of_other_tokenizers_have_bytes_too() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<0xE4>", "▁the", "and"]
    tokenizer = Tokenizer(models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
    assert [texts.text(token) for token in range(4)] == ["<unk>", "bytes:\\xe4", " the", "and"]
    assert [texts.shown(token) for token in range(4)] == [b"", b"\xe4", b" the", b"and"]
    nameless = TokenTexts(None)
    assert (nameless.text(7), nameless.shown(7)) == ("token_id:7", b"")
