"""`response_format` and `structured_outputs`: what reaches the engine, compiled away from its thread, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.request import Constraint
from specdec.server.options import ServerOptions
from specdec.testing import write_tiny_checkpoint
from tests.tiny_tokenizer import save_tiny_tokenizer

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "fake", "prompt": "hi"}
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
PATHS = ["/v1/chat/completions", "/v1/completions"]


def schema(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value", "constraint"),
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, Constraint("json_object")),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            Constraint("json_schema", schema(SCHEMA)),
        ),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n"}}, Constraint("json_schema", "{}")),
        ("structured_outputs", {"json": SCHEMA}, Constraint("json_schema", schema(SCHEMA))),
        ("structured_outputs", {"json": schema(SCHEMA)}, Constraint("json_schema", schema(SCHEMA))),
        ("structured_outputs", {"json_object": True}, Constraint("json_schema", '{"type": "object"}')),
        (
            "structured_outputs",
            {"json": "{}", "disable_any_whitespace": True},
            Constraint("json_schema", '{"x-guidance": {"whitespace_flexible": false}}'),
        ),
        ("structured_outputs", {"regex": "[ab]+", "after": "</think>"}, Constraint("regex", "[ab]+", after="</think>")),
        ("structured_outputs", {"choice": ["a", "b"]}, Constraint("choice", '["a", "b"]')),
        ("structured_outputs", {"grammar": 'root ::= "a"'}, Constraint("ebnf", 'root ::= "a"')),
        ("structured_outputs", {"grammar": 'start: "a"'}, Constraint("lark", 'start: "a"')),
    ],
)
def test_constraints(client: httpx.Client, engine: Any, path: str, field: str, value: Any, constraint: Constraint | None) -> None:
    response = client.post(path, json={**(CHAT if "chat" in path else TEXT), field: value})
    assert response.status_code == 200, response.text
    log = dict(engine.log)
    assert log["add"]["params"].constraint == constraint
    if constraint is None:
        assert "compile" not in log
    else:
        thread, compiled = log["compile"]
        assert compiled == constraint and thread.startswith("specdec-compile")


def test_an_answer_after_its_reasoning(client: httpx.Client, engine: Any) -> None:
    body = {**CHAT, "response_format": {"type": "json_object"}, "structured_outputs": {"after": "</think>"}}
    assert client.post(PATHS[0], json=body).status_code == 200
    assert dict(engine.log)["add"]["params"].constraint == Constraint("json_object", after="</think>")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": "{", "disable_any_whitespace": True}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]", "disable_any_whitespace": True}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"pattern": "a"}}, "structured_outputs.pattern"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}, "stream": True}, "structured_outputs"),
    ],
)
def test_refusals_name_the_field(client: httpx.Client, engine: Any, path: str, fields: dict[str, Any], param: str) -> None:
    response = client.post(path, json={**(CHAT if "chat" in path else TEXT), **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert "add" not in dict(engine.log)


def test_what_constraints_need_is_built_before_the_first_request(own_client: httpx.Client, own_engine: Any) -> None:
    assert own_client.get("/health").status_code == 200
    assert own_engine.prepared


@pytest.mark.parametrize("path", PATHS)
def test_a_real_engine_keeps_to_the_pattern(real_client: httpx.Client, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body = {"model": "worded", **prompt, "seed": 1, "max_tokens": 30, "structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}
    answer = client_text(real_client.post(path, json=body).json())
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", answer)
    drafted = real_client.post(path, json={**body, "speculative": {"drafter": "grammar+ngram"}}).json()
    assert client_text(drafted) == answer and drafted["choices"][0]["finish_reason"] == "stop"
    refused = real_client.post(path, json={**body, "structured_outputs": {"regex": "("}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "structured_outputs"
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"properties": {"a": {"not": {}}}}}}
    refused = real_client.post(path, json={**body, "structured_outputs": None, "response_format": form})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format"


def client_text(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.fixture(scope="module")
def real_client(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The server around an engine with a tiny model."""
    folder = save_tiny_tokenizer(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "worded"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    engine = Engine.from_config(EngineConfig(model=str(folder), dtype="float32", num_pages=64, page_size=4))
    with serving(engine, ServerOptions(port=0, served_model_name="worded")) as (client, _):
        yield client
