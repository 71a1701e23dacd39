"""The draft budget in a real engine: ids, drafters that turn, a sleeping drafter on a clock that the test holds, preemption anywhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.drafters.base import Drafter, DraftRow
from specdec.engine import Engine
from specdec.llm import LLM
from specdec.request import SamplingParams, Scheduling
from specdec.scheduler.scheduler import _Step
from specdec.testing import TINY_VOCAB_SIZE, Alt, Anti, Oracle, RandomTree, tiny_prompt
from specdec.tree import DraftTree
from tests.engine.conftest import GREEDY, MakeLLM, Reference, same

FORWARD_S = 0.010


class Clock:
    """Goes on only when a forward or a drafter takes its time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def drive(self, engine: Engine) -> None:
        """Makes the engine's seconds those of this clock, each forward taking FORWARD_S."""
        forward = engine.target.forward

        def timed(*args: object) -> object:
            self.now_s += FORWARD_S
            return forward(*args)  # type: ignore[arg-type]

        engine._backend.clock = self  # type: ignore[method-assign]
        engine.scheduler._clock = self
        engine.target.forward = timed  # type: ignore[method-assign,assignment]


class Sleeper(Drafter):
    """Takes `sleep_s` per call by the clock, and drafts with another drafter."""

    def __init__(self, clock: Clock, sleep_s: float, inner: Drafter) -> None:
        self.clock, self.sleep_s, self.inner = clock, sleep_s, inner
        self.default_limit = inner.default_limit

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        self.clock.now_s += self.sleep_s
        return self.inner.propose(rows)


@pytest.mark.parametrize("policy", ["auto", "all", 2])
def test_ids_do_not_depend_on_the_budget(make_llm: MakeLLM, reference: Reference, policy: str | int) -> None:
    prompts = [tiny_prompt(length) for length in (3, 17, 33, 64)]
    for params in (replace(GREEDY, max_tokens=64), SamplingParams(temperature=0.8, seed=7, max_tokens=48)):
        expected = reference.outputs(prompts, params)
        for drafter in ("ngram", RandomTree(TINY_VOCAB_SIZE, 6), Alt(reference.table(prompts), 2, TINY_VOCAB_SIZE)):
            outputs = make_llm(drafter, draft_budget=policy, num_pages=1024).generate(prompts, params)
            assert all(same(out, want) for out, want in zip(outputs, expected, strict=True))


def test_the_seconds_of_all_requests_add_up_to_the_wall_time(make_llm: MakeLLM, reference: Reference) -> None:
    prompts = [tiny_prompt(length) for length in (5, 33, 64)]
    clock = Clock()
    llm = make_llm(Sleeper(clock, 0.002, Oracle(reference.table(prompts))), draft_budget="auto", prefill_chunk=16)
    clock.drive(llm.engine)
    outputs = llm.generate(prompts, GREEDY)
    parts = ("prefill_s", "verify_s", "draft_s", "sample_s", "commit_s", "host_s")
    assert sum(getattr(out.stats, part) for out in outputs for part in parts) == pytest.approx(clock.now_s)
    assert all(sum(out.stats.draft_by.values()) == pytest.approx(out.stats.draft_s) for out in outputs)


def test_the_seconds_add_up_within_a_fiftieth_of_what_the_steps_take(make_llm: MakeLLM) -> None:
    """By the thread's own clock, which other programs do not move between the step's first and last look at it."""
    llm = make_llm("ngram", draft_budget="auto", check_invariants=False)
    engine = llm.engine
    engine._backend.clock = engine.scheduler._clock = time.thread_time  # type: ignore[method-assign]
    for index in range(8):
        engine.add(tiny_prompt(40, seed=index), replace(GREEDY, max_tokens=48))
    stats = {}
    wall_s = 0.0
    while engine.has_work:
        start = engine._backend.clock()
        events = engine.step()
        wall_s += engine._backend.clock() - start
        stats.update({event.request_id: event.stats for event in events})
    parts = ("prefill_s", "verify_s", "draft_s", "sample_s", "commit_s", "host_s")
    booked_s = sum(getattr(one, part) for one in stats.values() for part in parts)
    assert booked_s == pytest.approx(wall_s, rel=0.02)


def test_a_wrong_drafter_that_sleeps_four_steps_costs_a_tenth_at_most_and_is_used_again_once_it_is_right(
    make_llm: MakeLLM, reference: Reference
) -> None:
    prompt = tiny_prompt(16)
    params = replace(GREEDY, max_tokens=200, ignore_eos=True)
    table = {tuple(prompt): reference.ids(prompt, params)}
    clock = Clock()
    sleeper = Sleeper(clock, 4 * FORWARD_S, Anti(table, TINY_VOCAB_SIZE))
    llm = make_llm(sleeper, draft_budget="auto", prefix_cache=False)
    clock.drive(llm.engine)
    llm.generate([prompt], params)
    first_s = clock.now_s
    assert first_s <= 1.1 * 200 * FORWARD_S
    sleeper.inner = Oracle(table)
    emitted = accepted_at = 0
    llm.engine.add(prompt, params)
    while llm.engine.has_work:
        for event in llm.engine.step():
            emitted += len(event.token_ids)
            if event.num_accepted and not accepted_at:
                accepted_at = emitted
    assert 0 < accepted_at <= 64
    assert clock.now_s - first_s < 200 * FORWARD_S, "it pays now, and is used"


def test_max_draft_caps_a_request(make_llm: MakeLLM, reference: Reference) -> None:
    prompts = [tiny_prompt(16), tiny_prompt(17)]
    llm = make_llm(Oracle(reference.table(prompts)))
    none, few = (llm.generate(prompts, GREEDY, scheduling=Scheduling(max_draft=limit)) for limit in (0, 2))
    assert [out.stats.drafted for out in none] == [0, 0]
    assert all(0 < out.stats.drafted <= 2 * out.stats.verifies for out in few)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("drafter", ["off", "self", "ngram"])
def test_preemption_at_every_step_changes_nothing(
    make_llm: MakeLLM, reference: Reference, tiny: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, swap: bool
) -> None:
    """K13, K12, K1: whoever is last gives up its KV just before step k, for every k of the run."""
    monkeypatch.setattr("specdec.scheduler.scheduler.swap_pays", lambda *_: swap)
    prompts = [tiny_prompt(length, seed=length) for length in (9, 20, 33)]
    params = replace(GREEDY, max_tokens=24)
    expected = [out.token_ids for out in reference.outputs(prompts, params)]
    spec = f"model:{tiny}(depth=3)" if drafter == "self" else drafter
    llm = make_llm(spec, num_pages=64, prefill_chunk=12, prefix_cache=False, swap_gb=0.001)
    engine, k = llm.engine, 0
    assert engine.kv.swap is not None
    while _run_with_preemption(llm, prompts, params, k, expected, acceptance_is_one=drafter == "self"):
        assert engine.kv.num_free == 64
        assert engine.kv.swap.num_free == engine.kv.swap.num_places
        engine.kv.check()
        k += 1
    assert k > 8, "every step of a run was disturbed"
    assert engine.kv.swap.pages_out == engine.kv.swap.pages_in
    assert (engine.kv.swap.pages_in > 0) == swap


def _run_with_preemption(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, k: int, expected: Sequence[Sequence[int]], *, acceptance_is_one: bool
) -> bool:
    """Whether step k was reached with somebody running."""
    engine = llm.engine
    ids = [engine.add(prompt, params)[0] for prompt in prompts]
    outputs: dict[str, list[int]] = {name: [] for name in ids}
    stats = {}
    disturbed, step = False, 0
    while engine.has_work:
        if step == k and engine.scheduler.running:
            engine.scheduler._preempt(_Step(engine.kv, 0))
            disturbed = True
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
            stats[event.request_id] = event.stats
        step += 1
    assert [tuple(outputs[name]) for name in ids] == [tuple(ids) for ids in expected]
    if acceptance_is_one:
        assert all(one.accepted == one.drafted > 0 for one in stats.values())
    return disturbed or k == 0


def test_drafts_cost_the_prefix_cache_no_more_than_two_points_of_its_hits(make_llm: MakeLLM) -> None:
    def hit_rate(drafter: object) -> float:
        llm = make_llm(drafter, num_pages=72, max_num_seqs=4, max_batch_tokens=64)
        for turn in range(12):
            prompts = [tiny_prompt(32, seed=family) + tiny_prompt(6, seed=100 + turn) for family in range(6)]
            llm.generate(prompts, replace(GREEDY, max_tokens=12))
        stats = llm.engine.kv.stats
        assert stats.evictions > 0, "the pool is under pressure"
        return stats.hits / stats.queries

    without, with_drafts = hit_rate("off"), hit_rate(RandomTree(TINY_VOCAB_SIZE, 8))
    assert without > 0.1
    assert with_drafts >= without - 0.02
