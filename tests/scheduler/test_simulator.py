"""The simulator: event loop, clocks, books, and what its figures must be on traffic small enough to compute by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.scheduler.simulator.acceptance_law import Category
from specdec.scheduler.simulator.costs import DraftCost, HostCost
from specdec.scheduler.simulator.profile import Profile
from specdec.scheduler.simulator.report import build_report, format_report, itl_of, ttft_of
from specdec.scheduler.simulator.roofline import Load
from specdec.scheduler.simulator.simulator import Policy, Run, Scenario, simulate
from specdec.scheduler.simulator.traces import TraceRequest


class Linear:
    """10 ms, and 1 ms for each token row."""

    def seconds(self, load: Load) -> float:
        return 0.010 + 0.001 * load.tokens


PROFILE = Profile(
    name="linear",
    about="10 ms + 1 ms per row",
    kind="theoretical",
    forward=Linear(),
    drafters={"ngram": DraftCost(8, call_s=0.001), "head": DraftCost(4, Linear())},
    host=HostCost(),
    kv_tokens=64 * 16,
)


def scenario(*requests: tuple[float, int, int], policy: str = "off", rates: tuple[float, ...] = (0.6,), **fields: Any) -> Scenario:
    """Of requests as (arrival, prompt, output)."""
    options = fields.pop("options", {})
    return Scenario(
        trace=[TraceRequest(*request) for request in requests],
        profile=fields.pop("profile", PROFILE),
        categories=[Category("all", rates)],
        policy=Policy.parse(policy),
        config=EngineConfig(drafter=fields.pop("drafter", "ngram"), **{"max_num_seqs": 8, "max_batch_tokens": 64, **options}),
        **fields,
    )


def report_of(found: Run, asked: Scenario) -> dict[str, Any]:
    return build_report(found, asked, {"trace": "t", "policy": asked.policy.name})


def test_times_of_one_request_without_drafts() -> None:
    found = simulate(scenario((0.0, 20, 5)))
    job = found.ended[0]
    assert ttft_of(job) == pytest.approx(0.030)
    assert itl_of(job) == pytest.approx(0.011)
    assert job.longest_gap_s == pytest.approx(0.011)
    assert found.end_s == pytest.approx(0.030 + 4 * 0.011)
    assert job.request.num_output == 5
    assert [step.emitted for step in found.replicas[0].steps] == [1] * 5


def test_an_idle_server_waits_for_the_arrival() -> None:
    found = simulate(scenario((0.0, 20, 1), (1.0, 20, 1)))
    assert [ttft_of(job) for job in found.ended] == pytest.approx([0.030, 0.030])
    assert found.end_s == pytest.approx(1.030)


def test_a_request_that_comes_within_a_step_waits_for_its_end() -> None:
    found = simulate(scenario((0.0, 20, 1), (0.020, 20, 1)))
    assert [ttft_of(job) for job in found.ended] == pytest.approx([0.030, 0.040])
    assert found.ended[1].request.stats.queue_s == pytest.approx(0.010)


def test_drafts_that_are_all_accepted() -> None:
    found = simulate(scenario((0.0, 20, 10), policy="fixed:2", rates=(1.0,)))
    job = found.ended[0]
    stats = job.request.stats
    assert (stats.drafted, stats.accepted, stats.verifies, stats.emitted) == (6, 6, 3, 9)
    assert found.end_s == pytest.approx(0.030 + 3 * (0.013 + 0.001))
    assert stats.draft_s == pytest.approx(0.003)


def test_a_stop_cuts_the_draft_that_passes_it() -> None:
    found = simulate(scenario((0.0, 20, 4), policy="fixed:8", rates=(1.0,)))
    stats = found.ended[0].request.stats
    assert found.ended[0].request.num_output == 4
    assert (stats.verifies, stats.accepted, stats.emitted) == (1, 3, 3)


def test_drafts_that_are_never_accepted_cost_their_time_only() -> None:
    wasted = simulate(scenario((0.0, 20, 5), policy="fixed:3", rates=(0.0,)))
    stats = wasted.ended[0].request.stats
    assert (stats.accepted, stats.verifies) == (0, 4)
    assert wasted.end_s == pytest.approx(0.030 + 4 * (0.014 + 0.001))


def test_a_drafter_with_kv_catches_up_once() -> None:
    found = simulate(scenario((0.0, 20, 4), policy="fixed:2", rates=(0.0,), drafter="head"))
    drafting = [sum(step.cost.draft_s.values()) for step in found.replicas[0].steps]
    # prompt and first token, then one new token per step; a second forward of one row each time
    assert drafting == pytest.approx([0.0, 0.031 + 0.011, 0.011 + 0.011, 0.011 + 0.011])


@pytest.mark.parametrize("policy", ["off", "fixed:1", "fixed:5", "all"])
def test_outputs_are_as_long_as_the_trace_says_and_the_books_balance(policy: str) -> None:
    requests = [(0.02 * number, 5 + 7 * number % 40, 1 + 5 * number % 23) for number in range(40)]
    found = simulate(scenario(*requests, policy=policy, options={"num_pages": 10}))
    assert sorted((job.number, job.request.num_output) for job in found.ended) == [(i, output) for i, (_, _, output) in enumerate(requests)]
    assert found.refused == []
    replica = found.replicas[0]
    replica.kv.check()
    assert replica.kv.num_available == replica.kv.num_pages
    assert sum(job.request.stats.preemptions for job in found.ended) == replica.scheduler.preemptions > 0


def test_the_seconds_of_the_steps_are_those_of_the_run_and_of_the_requests() -> None:
    found = simulate(scenario((0.0, 20, 9), (0.0, 33, 7), policy="fixed:2"))
    steps = found.replicas[0].steps
    assert sum(step.cost.total_s for step in steps) == pytest.approx(found.end_s)
    stats = [job.request.stats for job in found.ended]
    booked = sum(s.draft_s + s.verify_s + s.prefill_s + s.sample_s + s.commit_s + s.host_s for s in stats)
    assert booked == pytest.approx(found.end_s)


def test_all_policies_meet_the_same_luck() -> None:
    requests = [(0.0, 8, 60)] * 4

    def accepted_of_first_nodes(policy: str) -> dict[int, int]:
        found = simulate(scenario(*requests, policy=policy, rates=(0.5, 0.0)))
        return {job.number: job.request.stats.accepted for job in found.ended}

    # behind a rejected or cut second node the third is never reached: longer drafts change nothing
    assert accepted_of_first_nodes("fixed:2") == accepted_of_first_nodes("fixed:4") == accepted_of_first_nodes("fixed:7")


def test_equal_seeds_give_equal_runs() -> None:
    asked = scenario(*[(0.01 * i, 30, 20) for i in range(10)], policy="fixed:3", noise=0.3, seed=5)
    assert simulate(asked).end_s == simulate(asked).end_s != simulate(replace(asked, seed=6)).end_s


def test_replicas_share_the_requests() -> None:
    requests = [(0.0, 20, 5)] * 4
    found = simulate(scenario(*requests, replicas=2))
    assert sorted(job.replica for job in found.ended) == [0, 0, 1, 1]
    assert found.end_s == pytest.approx(simulate(scenario(*requests[:2])).end_s)


def test_concurrency_replaces_each_request_that_ends() -> None:
    asked = scenario(*[(100.0 * i, 10, 5) for i in range(6)], concurrency=2)
    found = simulate(asked)
    assert len(found.ended) == 6
    assert max(step.running for step in found.replicas[0].steps) == 2
    assert found.end_s < 1.0


@pytest.mark.parametrize("concurrency", [None, 1])
def test_what_can_never_run_is_refused_with_its_reason(concurrency: int | None) -> None:
    found = simulate(scenario((0.0, 64 * 16, 5), (0.1, 20, 5), concurrency=concurrency))
    assert found.refused == [(0, "context_length_exceeded")]
    assert [job.number for job in found.ended] == [1]


def test_a_full_queue_refuses() -> None:
    found = simulate(scenario(*[(0.0, 20, 5)] * 5, options={"max_num_seqs": 1, "max_queue": 2}))
    assert found.refused == [(2, "overloaded"), (3, "overloaded"), (4, "overloaded")]


def test_an_output_that_outgrows_the_pool_ends_at_its_length() -> None:
    found = simulate(scenario((0.0, 20, 5000), policy="fixed:7"))
    assert len(found.ended[0].request.tokens) == 64 * 16


def test_equal_prompt_blocks_are_found_in_the_prefix_cache() -> None:
    trace = [TraceRequest(0.0, 600, 2, (7, 8)), TraceRequest(9.0, 600, 2, (7, 9)), TraceRequest(18.0, 600, 2)]
    asked = replace(scenario((0.0, 1, 1)), trace=trace, profile=replace(PROFILE, kv_tokens=4096))
    found = simulate(asked)
    assert [job.request.stats.cached_prompt_tokens for job in found.ended] == [0, 512, 0]
    assert report_of(found, asked)["prefix_cache"]["hit_rate"] == pytest.approx(512 / 1800)
    without = simulate(replace(asked, config=replace(asked.config, prefix_cache=False)))
    assert [job.request.stats.cached_prompt_tokens for job in without.ended] == [0, 0, 0]


def test_goodput_counts_the_requests_within_both_targets() -> None:
    asked = scenario((0.0, 20, 5), (0.0, 40, 1))
    found = simulate(asked)
    assert [ttft_of(job) for job in found.ended] == pytest.approx([0.070, 0.070])

    def report_under(**targets: float) -> dict[str, Any]:
        return report_of(found, replace(asked, config=replace(asked.config, **targets)))

    assert report_of(found, asked)["goodput"]["share"] == 1.0
    assert report_under(target_ttft_ms=69)["goodput"]["share"] == 0.0
    within = report_under(target_ttft_ms=71, target_itl_ms=10.9)
    assert within["requests"]["good"] == 1
    assert within["goodput"]["tokens_per_s"] == pytest.approx(1 / found.end_s)
    assert within["tokens_per_s"] == pytest.approx(6 / found.end_s)


def test_the_scheduler_works_towards_the_targets() -> None:
    requests = [(0.0, 20, 30), (0.05, 300, 2)]
    free, held = (simulate(scenario(*requests, options=options)) for options in ({}, {"target_itl_ms": 40.0}))
    gaps = [next(job.longest_gap_s for job in found.ended if job.number == 0) for found in (free, held)]
    assert gaps[0] > 0.070 > 0.045 > gaps[1]


def test_requests_that_would_come_too_late_are_refused() -> None:
    found = simulate(scenario(*[(0.0, 300, 2)] * 8, options={"target_ttft_ms": 600.0}))
    assert 0 < len(found.refused) < 8
    assert {reason for _, reason in found.refused} == {"overloaded"}


@pytest.mark.parametrize("gap", [0.2, 0.02])
def test_without_drafts_the_estimated_speedup_is_one_with_prompts_in_the_steps_too(gap: float) -> None:
    asked = scenario(*[(gap * i, 20, 15) for i in range(20)])
    found = simulate(asked)
    steps = found.replicas[0].steps
    assert any(step.decode_rows and step.prefill_tokens for step in steps) == (gap < 0.1)
    assert report_of(found, asked)["speculation"]["estimated_speedup"] == pytest.approx(1.0)


def test_report_and_its_text() -> None:
    asked = scenario(*[(0.2 * i, 20, 15) for i in range(20)], policy="fixed:2", rates=(0.7, 0.6))
    found = simulate(asked)
    report = report_of(found, asked)
    steps = found.replicas[0].steps
    assert sum(report["spent_s"].values()) == pytest.approx(sum(step.cost.total_s for step in steps))
    speculation = report["speculation"]
    assert speculation["drafted"] == sum(step.drafted for step in steps)
    assert 1.0 < speculation["estimated_speedup"] < speculation["acceptance_length"]
    assert speculation["wasted"] == speculation["drafted"] - speculation["accepted"]
    assert speculation["categories"]["all"]["acceptance_length"] == pytest.approx(speculation["acceptance_length"])
    course = report["course"]
    assert sum(interval["steps"] for interval in course) == len(steps)
    assert sum(interval["tokens_per_s"] for interval in course) * found.end_s / len(course) == pytest.approx(20 * 15)
    assert report["latency_s"]["end_to_end"]["p50"] <= report["latency_s"]["end_to_end"]["p99"]
    text = format_report(report)
    assert "20 requests" in text
    assert f"drafted {speculation['drafted']}" in text


def test_nothing_ended_is_reported_too() -> None:
    asked = scenario((0.0, 64 * 16, 5))
    report = report_of(simulate(asked), asked)
    assert report["goodput"] == {"tokens_per_s": 0.0, "requests_per_s": 0.0, "share": 0.0}
    assert "1 context_length_exceeded" in format_report(report)


@pytest.mark.parametrize("text", ["fixed", "fixed:0", "fixed:-1", "fixed:x", "fixed:257", "fast", ""])
def test_wrong_policies_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="a policy is off, auto, all, or fixed:K"):
        Policy.parse(text)


def test_a_drafter_that_the_profile_lacks() -> None:
    with pytest.raises(ConfigError, match="profile linear has no drafter 'suffix'; it has ngram, head"):
        simulate(scenario((0.0, 2, 2), drafter="suffix", policy="auto"))
