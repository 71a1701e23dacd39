"""The real openai client against the real engine with the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from specdec.config import EngineConfig
from specdec.server.options import ServerOptions

pytestmark = pytest.mark.demo_model
EMOJI: list[Any] = [{"role": "user", "content": "Repeat exactly: 🎉 世界 🚀 日本語 🎉 世界 🚀 日本語"}]
FRANCE: list[Any] = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def api(demo_model: Path, serving: Any) -> Iterator[openai.OpenAI]:
    from specdec.engine import Engine

    engine = Engine.from_config(
        EngineConfig(model=str(demo_model), drafter="ngram", max_model_len=256, max_num_seqs=4, check_invariants=True)
    )
    options = ServerOptions(port=0, served_model_name="smollm2")
    with serving(engine, options) as (client, _):
        url = str(client.base_url.join("/v1"))
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as api:
            yield api


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["smollm2"]


def test_chat_whole_and_streamed_agree(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=24)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    text, finishes, usage = "", [], None
    for chunk in api.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert finishes == ["stop"]
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_sampled_choices_in_a_stream(api: openai.OpenAI, drafter: str) -> None:
    options: dict[str, Any] = {
        "model": "smollm2",
        "messages": EMOJI,
        "n": 3,
        "seed": 11,
        "temperature": 0.5,
        "max_tokens": 14,
        "extra_body": {"speculative": {"drafter": drafter}},
    }
    whole = api.chat.completions.create(**options)
    texts = ["", "", ""]
    finishes: list[list[str]] = [[], [], []]
    usages = []
    for chunk in api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        if chunk.usage:
            assert chunk.choices == []
            usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert all(len(reasons) == 1 for reasons in finishes)
    assert len(usages) == 1
    assert usages[0].completion_tokens == whole.usage.completion_tokens
    plain = api.chat.completions.create(**{**options, "extra_body": {"speculative": {"drafter": "off"}}})
    assert texts == [choice.message.content for choice in plain.choices]


def test_stop_text_is_cut(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=24)
    content = whole.choices[0].message.content or ""
    stop = content[8:14]
    stopped = api.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=24, stop=[stop])
    assert stopped.choices[0].message.content == content[: content.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    streamed = ""
    for chunk in api.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=24, stop=[stop], stream=True):
        streamed += chunk.choices[0].delta.content or ""
    assert streamed == stopped.choices[0].message.content


def test_completions(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="smollm2", prompt=["1, 2, 3, 4,", "a b c d a b c"], max_tokens=6, temperature=0, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("1, 2, 3, 4, 5")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own(api: openai.OpenAI, stream: bool) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 400}]
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="smollm2", messages=long, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="other", messages=FRANCE, stream=stream)
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="smollm2", messages=FRANCE, stream=stream, extra_body={"speculative": {"drafter": "model:/x"}})
    assert caught.value.param == "speculative.drafter"


def test_usage_tells_what_drafting_brought(api: openai.OpenAI) -> None:
    repeat: list[Any] = [{"role": "user", "content": "Repeat: one two three one two three one two three one two three"}]
    told = {}
    for drafter in ("off", "ngram"):
        answer = api.chat.completions.create(
            model="smollm2", messages=repeat, temperature=0, max_tokens=40, extra_body={"speculative": {"drafter": drafter}}
        )
        assert answer.usage is not None
        told[drafter] = answer.usage.model_dump()["speculative"]
    assert (told["off"]["drafted"], told["off"]["acceptance_length"]) == (0, 1.0)
    assert told["ngram"]["drafted"] >= told["ngram"]["accepted"] > 0
    assert told["ngram"]["acceptance_length"] > 1 and told["ngram"]["draft_s"] > 0 and told["ngram"]["verify_s"] > 0
