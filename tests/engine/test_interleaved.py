"""Several readers of one LLM: every one gets all of its own, whoever steps the engine."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from specdec.errors import EngineDeadError, RequestError, SpecdecError
from specdec.testing import tiny_prompt
from tests.engine.conftest import GREEDY, MakeLLM, Reference

A, B = tiny_prompt(9), tiny_prompt(12)


def ids_of(events) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_two_streams_read_in_turn_are_both_whole(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm("ngram")
    got: list[list[int]] = [[], []]
    streams = [llm.stream(A, GREEDY), llm.stream(B, GREEDY)]
    while any(len(ids) < 32 for ids in got):
        for ids, stream in zip(got, streams, strict=True):
            ids += ids_of([event] if (event := next(stream, None)) else [])
    assert got == [reference.ids(A), reference.ids(B)]


def test_generate_within_a_stream_or_a_progress_call_loses_nothing(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    events = []
    for event in llm.stream(A, GREEDY):
        events.append(event)
        if len(events) == 3:
            assert list(llm.generate([B], GREEDY)[0].token_ids) == reference.ids(B)
    assert ids_of(events) == reference.ids(A)
    inner = []

    def progress(count: int) -> None:
        if not inner:
            inner.append(list(llm.generate([B], GREEDY)[0].token_ids))

    assert list(llm.generate([A], GREEDY, progress=progress)[0].token_ids) == reference.ids(A)
    assert inner == [reference.ids(B)]


def test_threads_may_generate_at_once(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm("ngram")
    prompts = [tiny_prompt(5 + i) for i in range(4)]
    outputs: dict[int, list[int]] = {}

    def work(index: int) -> None:
        for _ in range(3):
            outputs[index] = list(llm.generate([prompts[index]], GREEDY)[0].token_ids)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outputs[index] for index in range(4)] == [reference.ids(prompt) for prompt in prompts]
    assert llm.engine.kv.num_available == llm.engine.kv.num_pages


def test_a_logits_processor_must_not_generate(make_llm: MakeLLM) -> None:
    llm = make_llm()
    seen = []

    def processor(ids, logits):
        with pytest.raises(SpecdecError, match="middle of a step") as caught:
            llm.generate([B], GREEDY)
        seen.append(caught.value)
        return logits

    llm.generate([A], replace(GREEDY, max_tokens=2, logits_processors=(processor,)))
    assert seen


def test_after_close_there_is_a_clear_error(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream(A, GREEDY)
    next(stream)
    llm.close()
    assert [event.finish_reason for event in stream] == ["abort"]
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate([A], GREEDY)


@pytest.mark.parametrize("prompt", [None, 5, [["a"]], [[1.5]], [[1, [2]]], [[[1]]]])
def test_what_is_no_prompt_is_refused(make_llm: MakeLLM, prompt) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match=r"text or a sequence of token ids"):
        llm.generate(prompt, GREEDY)
    assert not llm.engine.has_work


def test_arrays_are_prompts_too(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    for prompt in (np.array(A), [np.array(A)]):
        assert list(llm.generate(prompt, GREEDY)[0].token_ids) == reference.ids(A)


def test_more_choices_than_can_ever_wait_are_refused_for_good(make_llm: MakeLLM) -> None:
    llm = make_llm(max_queue=3)
    with pytest.raises(RequestError, match="never wait"):
        llm.generate([A], replace(GREEDY, n=4))
