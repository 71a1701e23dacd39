"""Whatever is wrong with a request is a 4xx that names the field, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "fake", "prompt": "hi"}
SENT_RAW = {"Content-Type": "application/json"}


def check_error(response: httpx.Response, status: int = 400, param: str | None = None, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


@pytest.fixture(scope="module", autouse=True)
def alive_in_the_end(shared: tuple[Any, httpx.Client]) -> Iterator[None]:
    """After all of these, good requests still work."""
    yield
    shared[0].full = False
    check_alive(shared[1])


def check_alive(client: httpx.Client) -> None:
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert client.post("/v1/completions", json=TEXT).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", "7", "max_tokens"),
        ("n", 0, "n"),
        ("n", 1000, "n"),
        ("temperature", -1, "temperature"),
        ("temperature", "hot", "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", 1.1, "top_p"),
        ("top_k", -1, "top_k"),
        ("min_p", 2, "min_p"),
        ("seed", -1, "seed"),
        ("seed", 2**64, "seed"),
        ("stop", [""], "stop"),
        ("stop", 5, "stop"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("speculative", {"drafter": "off", "depth": 3}, "speculative.depth"),
        ("speculative", {"drafter": "ngram("}, "speculative.drafter"),
        ("speculative", {"drafter": "model:/x"}, "speculative.drafter"),
        ("speculative", "ngram", "speculative"),
        ("speculative", {"verify_rule": "typical"}, "speculative.verify_rule"),
        ("prediction", {"type": "image", "content": "x"}, "prediction.type"),
        ("tepmerature", 1, "tepmerature"),
        ("logprobs", "yes", "logprobs"),
        ("logprobs", -1, "logprobs"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("repetition_penalty", "1", "repetition_penalty"),
        ("frequency_penalty", 2.5, "frequency_penalty"),
        ("presence_penalty", -3, "presence_penalty"),
        ("typical_p", 0, "typical_p"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"-1": 1}, "logit_bias"),
        ("logit_bias", {"3": "much"}, "logit_bias.3"),
        ("logit_bias", [1], "logit_bias"),
        ("bad_words", [""], "bad_words"),
        ("bad_words", [[]], "bad_words"),
        ("bad_words", "word", "bad_words"),
        ("allowed_token_ids", [], "allowed_token_ids"),
        ("allowed_token_ids", [-1], "allowed_token_ids"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("tools", [{"type": "function"}], "tools"),
        ("min_tokens", -1, "min_tokens"),
        ("min_tokens", 1.5, "min_tokens"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bad_field(client: httpx.Client, path: str, field: str, value: Any, param: str) -> None:
    base = CHAT if "chat" in path else TEXT
    check_error(client.post(path, json={**base, field: value}), param=param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"model": "fake"}, "messages"),
        ("/v1/chat/completions", {**CHAT, "messages": []}, "messages"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user"}]}, "messages[0].content"),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content",
        ),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": CHAT["messages"]}, "model"),
        ("/v1/completions", {"model": "fake"}, "prompt"),
        ("/v1/completions", {**TEXT, "prompt": []}, "prompt"),
        ("/v1/completions", {**TEXT, "prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {**TEXT, "prompt": ["a", 1]}, "prompt"),
        ("/v1/completions", {**TEXT, "best_of": 3, "stream": True}, "best_of"),
        ("/v1/completions", {**TEXT, "best_of": 2, "n": 3}, "best_of"),
        ("/v1/completions", {**TEXT, "best_of": 0}, "best_of"),
        ("/v1/completions", {**TEXT, "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ("/v1/completions", {**TEXT, "top_logprobs": 1}, "top_logprobs"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 1}, "top_logprobs"),
        ("/v1/chat/completions", {**CHAT, "logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ("/v1/chat/completions", {**CHAT, "logprobs": 1}, "logprobs"),
        ("/v1/chat/completions", {**CHAT, "best_of": 2}, "best_of"),
        ("/v1/completions", {**TEXT, "suffix": "end"}, "suffix"),
        ("/v1/completions", {**TEXT, "logprobs": True}, "logprobs"),
        ("/v1/completions", {**TEXT, "logprobs": 1000}, "logprobs"),
        ("/v1/completions", {**TEXT, "messages": []}, "messages"),
        ("/v1/completions", {**TEXT, "speculative": {"drafter": "off"}, "prediction": {"type": "content", "content": "x"}}, "prediction"),
    ],
)
def test_bad_body(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = client.post(path, json=body)
    check_error(response, param=param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"model": "fake", "messages": [}',
        b"[1]",
        b"null",
        b'{"model": "fake", "prompt": "\xff"}',
        b'{"model": "fake", "prompt": "\\ud800"}',
        b'{"model": "fake", "prompt": "x", "temperature": NaN}',
        b"[" * 100_000,
    ],
)
def test_broken_json(client: httpx.Client, raw: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        check_error(client.post(path, content=raw, headers=SENT_RAW), code="invalid_json")
    check_alive(client)


def test_duplicate_field(client: httpx.Client) -> None:
    raw = b'{"model": "fake", "prompt": "x", "seed": 1, "seed": 2}'
    check_error(client.post("/v1/completions", content=raw, headers=SENT_RAW), param="seed")


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_too_long(client: httpx.Client, stream: bool) -> None:
    long = "x" * 70
    chat = {**CHAT, "messages": [{"role": "user", "content": long}], "stream": stream}
    check_error(client.post("/v1/chat/completions", json=chat), param="messages", code="context_length_exceeded")
    text = {**TEXT, "prompt": long, "stream": stream}
    check_error(client.post("/v1/completions", json=text), param="prompt", code="context_length_exceeded")
    echo = {**text, "echo": True, "max_tokens": 0}
    check_error(client.post("/v1/completions", json=echo), param="prompt", code="context_length_exceeded")
    check_alive(client)


def test_an_unknown_field_is_told_with_those_of_its_object(client: httpx.Client) -> None:
    for place in ({"speculative": {"target_itl_ms": 1}}, {"stream_options": {"target_itl_ms": 1}}):
        (name,) = place
        answer = client.post("/v1/completions", json={**TEXT, **place})
        check_error(answer, param=f"{name}.target_itl_ms", code="unknown_field")
        known = "drafter, max_draft, verify_rule" if name == "speculative" else "include_obfuscation, include_usage"
        assert answer.json()["error"]["message"].endswith(f"known: {known}")


def test_unknown_model_and_route(client: httpx.Client) -> None:
    check_error(client.post("/v1/completions", json={**TEXT, "model": "gpt"}), 404, "model", "model_not_found")
    check_error(client.get("/v1/models/gpt"), 404, "model", "model_not_found")
    check_error(client.get("/v1/nothing"), 404)
    check_error(client.get("/v1/completions"), 405)


def test_body_too_large(client: httpx.Client) -> None:
    body = {**TEXT, "prompt": "x" * (5 << 20)}
    check_error(client.post("/v1/completions", json=body), 413, code="body_too_large")
    check_alive(client)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_neutral_values_are_accepted(client: httpx.Client, path: str) -> None:
    neutral: dict[str, Any] = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "logprobs": None,
        "tools": None,
        "response_format": {"type": "text"},
        "stop": None,
        "seed": None,
        "n": 1,
        "user": "someone",
        "metadata": {"a": "b"},
        "stream": False,
        "stream_options": None,
    }
    assert client.post(path, json={**(CHAT if "chat" in path else TEXT), **neutral}).status_code == 200


def test_overload_is_503_and_can_be_retried(client: httpx.Client, engine: Any) -> None:
    engine.full = True
    response = client.post("/v1/completions", json=TEXT)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "overloaded"
    engine.full = False
    check_alive(client)


def test_one_bad_prompt_of_several_runs_none(client: httpx.Client, engine: Any) -> None:
    check_error(client.post("/v1/completions", json={**TEXT, "prompt": ["ok", "x" * 70]}), param="prompt", code="context_length_exceeded")
    assert engine.log[-1][0] == "abort"
    assert not engine.running


def test_the_error_names_what_is_allowed(client: httpx.Client) -> None:
    message = client.post("/v1/completions", json={**TEXT, "store": True}).json()["error"]["message"]
    assert "store" in message
    assert json.dumps(False) in message
