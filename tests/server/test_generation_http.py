"""Answers, streamed and whole, against a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "fake", "prompt": "hi"}
WHOLE = "Grüße, 世界! 🎉 The quick brown fox jumps over the lazy dog."


def events_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of every event, `[DONE]` as the string."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line[6:] for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_chat(client: httpx.Client, engine: Any) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, "seed": 5, "temperature": 0}).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": WHOLE, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len("u:hi;")
    assert answer["usage"]["completion_tokens"] == len(WHOLE)
    assert answer["usage"]["total_tokens"] == len("u:hi;") + len(WHOLE)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    added = engine.log[0][1]
    assert added["params"].seed == 5
    assert added["params"].max_tokens is None
    assert added["drafter"] is None


def test_content_parts_are_joined(client: httpx.Client, engine: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": "c"}]
    assert client.post("/v1/chat/completions", json={**CHAT, "messages": messages}).status_code == 200
    assert engine.tokenizer.decode(engine.log[0][1]["prompt"]) == "s:ab;u:c;"


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_stream(client: httpx.Client, include_usage: bool) -> None:
    body = {**CHAT, "n": 3, "max_completion_tokens": 11, "stream_options": {"include_usage": include_usage}}
    *chunks, done = events_of(client, "/v1/chat/completions", body)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 33
        assert last["usage"]["prompt_tokens"] == 5
    assert all(chunk.get("usage") is None for chunk in chunks)
    assert all(("usage" in chunk) == include_usage for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == WHOLE[:11]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]


def test_completion_defaults_and_echo(client: httpx.Client, engine: Any) -> None:
    answer = client.post("/v1/completions", json={**TEXT, "echo": True}).json()
    assert answer["choices"][0]["text"] == "hi" + WHOLE[:16]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16
    assert engine.log[0][1]["prompt"] == [0, ord("h"), ord("i")]


def test_completion_of_several_prompts(client: httpx.Client) -> None:
    body = {**TEXT, "prompt": [[65, 66], [67]], "n": 2, "max_tokens": 2, "echo": True}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["ABGr", "ABGr", "CGr", "CGr"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 8
    *chunks, done = events_of(client, "/v1/completions", body)
    assert done == "[DONE]"
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["ABGr", "ABGr", "CGr", "CGr"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_generates_nothing(client: httpx.Client, engine: Any, stream: bool) -> None:
    body = {**TEXT, "echo": True, "max_tokens": 0}
    if stream:
        *chunks, usage, done = events_of(client, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hi"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == 0
    else:
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == "hi"
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["prompt_tokens"] == 3
    assert engine.log == []


def test_prediction_picks_a_drafter_that_reads_it(client: httpx.Client, engine: Any) -> None:
    prediction = {"type": "content", "content": [{"type": "text", "text": "Gr"}]}
    answer = client.post("/v1/chat/completions", json={**CHAT, "prediction": prediction}).json()
    added = engine.log[0][1]
    assert added["drafter"] == "prediction"
    assert added["prediction"] == [ord("G"), ord("r")]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 2 * details["rejected_prediction_tokens"] > 0


def test_request_names_its_drafter(client: httpx.Client, engine: Any) -> None:
    assert client.post("/v1/completions", json={**TEXT, "speculative": {"drafter": "off"}}).status_code == 200
    assert engine.log[0][1]["drafter"] == "off"


def test_request_names_its_rule(client: httpx.Client, engine: Any) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        assert client.post(path, json={**body, "speculative": {"verify_rule": "traversal"}}).status_code == 200
    assert [(added["params"].verify_rule, added["drafter"]) for _, added in engine.log] == [("traversal", None)] * 2


def test_model_without_tokenizer_takes_ids(client: httpx.Client, engine: Any) -> None:
    engine.tokenizer = None
    assert client.post("/v1/completions", json={**TEXT, "prompt": [5, 6]}).status_code == 200
    for path, body, param in (("/v1/completions", TEXT, "prompt"), ("/v1/chat/completions", CHAT, "messages")):
        response = client.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


def test_operation_routes(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok", "running": 0}
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "fake"
    assert client.get("/v1/models/org/fake").json()["id"] == "fake"
    status = client.get("/v1/status").json()
    assert status["config"]["drafter"] == "ngram"
    assert status["server"]["max_body_bytes"] == 1 << 20
    assert status["drafters"] == {"ngram": {"state": "active"}}
