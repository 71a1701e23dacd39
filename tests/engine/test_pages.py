"""D13: page conservation under random stops, aborts, preemption and drafters, and abort at any point (K13)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.plan import Event
from specdec.request import SamplingParams
from specdec.testing import TINY_VOCAB_SIZE, Oracle, RandomTree, tiny_prompt
from tests.engine.conftest import GREEDY, MakeLLM, Reference

PAGE_GB = 2 * 2 * 4 * 2 * 16 * 4 / 1e9
"""A page of F-TINY: keys and values of 2 layers, 4 tokens, 2 heads of 16 floats."""


@pytest.mark.parametrize(("name", "swap_pages"), [("off", 0), ("ngram", 0), ("self", 0), ("random trees", 0), ("ngram", 7), ("self", 40)])
def test_three_hundred_random_requests_leave_no_page_behind(
    make_llm: MakeLLM, reference: Reference, tiny: Path, monkeypatch: pytest.MonkeyPatch, name: str, swap_pages: int
) -> None:
    """40 pages of 4; prompts of page-multiple and off-by-one lengths; every finished output equals the reference."""
    rng = random.Random(name)
    monkeypatch.setattr("specdec.scheduler.scheduler.swap_pays", lambda *_: True)
    swap_gb = swap_pages * PAGE_GB * (2 if name == "self" else 1) * 1.001  # twice: the drafter keeps its own
    drafter = {"self": f"model:{tiny}(depth=5)", "random trees": RandomTree(TINY_VOCAB_SIZE, 6)}.get(name, name)
    llm = make_llm(drafter, num_pages=40, page_size=4, max_num_seqs=8, max_batch_tokens=24, swap_gb=swap_gb)
    engine = llm.engine
    waiting = []
    for index in range(300):
        prompt = tiny_prompt(rng.choice([1, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33]), seed=rng.randrange(6))
        sampled = rng.random() < 0.3
        params = SamplingParams(temperature=0.8 if sampled else 0, seed=index, max_tokens=rng.choice([1, 2, 7, 8, 9, 24]))
        waiting.append((prompt, params, rng.choice([None, None, "off"]), rng.random() < 0.2))
    expected = [out.token_ids for out in reference.llm.generate([w[0] for w in waiting], [w[1] for w in waiting])]
    ids: dict[str, int] = {}
    doomed: set[str] = set()
    outputs: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    queue = list(enumerate(waiting))
    while queue or engine.has_work:
        while queue and len(ids) - len(reasons) < 12:
            index, (prompt, params, spec, abort) = queue.pop(0)
            (request_id,) = engine.add(prompt, params, drafter=spec)
            ids[request_id] = index
            if abort:
                doomed.add(request_id)
        for event in engine.step():
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason:
                assert event.request_id not in reasons
                reasons[event.request_id] = event.finish_reason
        for request_id in sorted(doomed - set(reasons)):
            if rng.random() < 0.3:
                engine.abort(request_id)
    assert len(reasons) == 300
    assert engine.kv.num_available == 40
    engine.kv.check()
    for request_id, index in ids.items():
        if reasons[request_id] == "abort":
            assert outputs[request_id] == list(expected[index])[: len(outputs[request_id])]
        else:
            assert tuple(outputs[request_id]) == expected[index]
    assert list(reasons.values()).count("abort") > 10
    engine.reset_prefix_cache()
    assert engine.kv.num_free == 40
    if engine.kv.swap is not None:
        assert engine.kv.swap.pages_out >= engine.kv.swap.pages_in > 0
        assert engine.kv.swap.num_free == engine.kv.swap.num_places == swap_pages


def test_preemption_changes_neither_ids_nor_the_acceptance_of_a_self_draft(make_llm: MakeLLM, reference: Reference, tiny: Path) -> None:
    prompts = [tiny_prompt(20, seed=s) for s in range(4)]
    params = replace(GREEDY, max_tokens=40)
    expected = [out.token_ids for out in reference.outputs(prompts, params)]
    for drafter in ("off", f"model:{tiny}(depth=4)"):
        llm = make_llm(drafter, num_pages=32, page_size=4, prefix_cache=False)
        outputs = llm.generate(prompts, params)
        assert [out.token_ids for out in outputs] == expected
        assert llm.engine.scheduler.preemptions > 0
        assert all(out.stats.accepted == out.stats.drafted for out in outputs)
        assert llm.engine.kv.num_free == 32


@pytest.mark.parametrize("steps", range(8))
def test_a_request_can_be_aborted_at_any_step_without_a_neighbour_noticing(make_llm: MakeLLM, reference: Reference, steps: int) -> None:
    mine, other = tiny_prompt(17), tiny_prompt(30)
    llm = make_llm(Oracle(reference.table([mine, other]), 3), prefill_chunk=8)
    (gone,) = llm.engine.add(mine, GREEDY)
    (kept,) = llm.engine.add(other, GREEDY)
    events: list[Event] = []
    for _ in range(steps):
        events += llm.engine.step()
    llm.engine.abort(gone)
    llm.engine.abort(gone)  # twice is once
    while llm.engine.has_work:
        events += llm.engine.step()
    assert [event.finish_reason for event in events if event.request_id == gone and event.finish_reason] == ["abort"]
    assert events and events[-1].request_id == kept
    ids = [token for event in events if event.request_id == kept for token in event.token_ids]
    assert ids == reference.ids(other)
    assert llm.engine.kv.num_available == llm.engine.kv.num_pages


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_request_that_ends_while_it_is_swapped_out_leaves_nothing_on_the_host(
    make_llm: MakeLLM, reference: Reference, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("specdec.scheduler.scheduler.swap_pays", lambda *_: True)
    engine = make_llm(num_pages=20, prefix_cache=False, swap_gb=0.001).engine
    (kept,), (gone,) = (engine.add(tiny_prompt(30, seed=seed), GREEDY) for seed in range(2))
    ids: list[int] = []
    swap = engine.kv.swap
    assert swap is not None
    while swap.pages_out == 0:
        ids += [token for event in engine.step() if event.request_id == kept for token in event.token_ids]
    assert swap.num_free < swap.num_places
    assert engine.status()["kv"]["swap"]["pages_out"] > 0
    if end == "close":
        engine.close()
    else:
        engine.abort(gone)
        while engine.has_work:
            ids += [token for event in engine.step() if event.request_id == kept for token in event.token_ids]
        assert ids == reference.ids(tiny_prompt(30, seed=0))
    assert swap.num_free == swap.num_places
    assert engine.kv.num_free == 20


def test_a_stream_that_is_closed_early_leaves_nothing_behind(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream(tiny_prompt(9), GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert llm.engine.kv.num_available == llm.engine.kv.num_pages
