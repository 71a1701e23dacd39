"""What a simulated run came to: percentiles, goodput under targets, where the seconds went, and its course over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.config import EngineConfig
from specdec.scheduler.simulator.replica import Job, StepRecord
from specdec.scheduler.simulator.simulator import Run, Scenario

Json = dict[str, Any]  # JSON values

PERCENTILES = (50, 95, 99)
_INTERVALS = 60


@dataclass(frozen=True)
class Targets:
    """What a user wants of a request; None is no wish.

    Attributes:
        ttft_s: seconds from arrival to the first token.
        itl_s: mean seconds per token after the first.
    """

    ttft_s: float | None = None
    itl_s: float | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> Targets:
        """Those that the scheduler works towards."""
        return cls(*(None if ms is None else ms / 1000 for ms in (config.target_ttft_ms, config.target_itl_ms)))

    def met(self, job: Job) -> bool:
        ttft, itl = ttft_of(job), itl_of(job)
        return (self.ttft_s is None or ttft <= self.ttft_s) and (self.itl_s is None or itl is None or itl <= self.itl_s)


def ttft_of(job: Job) -> float:
    """Seconds from arrival to the first token."""
    assert job.first_s is not None  # only ended jobs are asked, and they have emitted
    return job.first_s - job.request.arrival_s


def itl_of(job: Job) -> float | None:
    """Mean seconds per token after the first; None for outputs of one token."""
    after = job.request.num_output - 1
    return None if after == 0 or job.first_s is None else (job.last_s - job.first_s) / after


def build_report(run: Run, scenario: Scenario, case: Json) -> Json:
    """The JSON object of `specdec simulate --json`.

    Args:
        run, scenario: what was simulated. Requests within the targets of the scenario's config count as good.
        case: what to repeat of how it was asked for.
    """
    targets = Targets.of(scenario.config)
    good = [job for job in run.ended if targets.met(job)]
    steps = [step for replica in run.replicas for step in replica.steps]
    return {
        "case": {**case, "figures": f"simulated, costs {scenario.profile.kind}", "profile": scenario.profile.about},
        "requests": {
            "ended": len(run.ended),
            "good": len(good),
            "refused": dict(Counter(reason for _, reason in run.refused)),
            "preemptions": sum(job.request.stats.preemptions for job in run.ended),
        },
        "seconds": run.end_s,
        "tokens_per_s": _rate(run.ended, run.end_s),
        "goodput": {
            "tokens_per_s": _rate(good, run.end_s),
            "requests_per_s": len(good) / run.end_s if run.end_s else 0.0,
            "share": len(good) / (len(run.ended) + len(run.refused)),
        },
        "latency_s": _latency(run.ended),
        "spent_s": _spent(steps),
        "speculation": _speculation(steps, run.ended),
        "prefix_cache": _prefix(run),
        "predicted": _predicted(steps),
        "course": _course(run),
    }


def _rate(jobs: Sequence[Job], seconds: float) -> float:
    return sum(job.request.num_output for job in jobs) / seconds if seconds else 0.0


def _latency(jobs: Sequence[Job]) -> Json:
    itl = [seconds for job in jobs if (seconds := itl_of(job)) is not None]
    return {
        "ttft": _percentiles([ttft_of(job) for job in jobs]),
        "itl": _percentiles(itl),
        "longest_gap": _percentiles([job.longest_gap_s for job in jobs]),
        "end_to_end": _percentiles([job.last_s - job.request.arrival_s for job in jobs]),
        "queue": _percentiles([job.request.stats.queue_s for job in jobs]),
    }


def _percentiles(values: Sequence[float]) -> Json:
    if not values:
        return {}
    return {"mean": float(np.mean(values))} | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def _spent(steps: Sequence[StepRecord]) -> Json:
    """Seconds by what they were spent on, all replicas together; forwards with no decoding row are prefill."""
    draft = sum(sum(step.cost.draft_s.values()) for step in steps)
    prefill = sum(step.cost.verify_s for step in steps if step.decode_rows == 0)
    verify = sum(step.cost.verify_s for step in steps if step.decode_rows)
    sample, commit, host = (sum(getattr(step.cost, f"{part}_s") for step in steps) for part in ("sample", "commit", "host"))
    return {"draft": draft, "verify": verify, "prefill_only": prefill, "sample": sample, "commit": commit, "host": host}


def _speculation(steps: Sequence[StepRecord], jobs: Sequence[Job]) -> Json:
    stats = [job.request.stats for job in jobs]
    drafted, accepted = sum(stat.drafted for stat in stats), sum(stat.accepted for stat in stats)
    verifies, emitted = sum(stat.verifies for stat in stats), sum(stat.emitted for stat in stats)
    decode_s, off_s = sum(stat.decode_s for stat in stats), sum(stat.off_s for stat in stats)
    return {
        "drafted": drafted,
        "accepted": accepted,
        "wasted": drafted - accepted,
        "verifies": verifies,
        "steps": len(steps),
        "draft_length": drafted / verifies if verifies else 0.0,
        "acceptance_length": emitted / verifies if verifies else 1.0,
        "estimated_speedup": off_s / decode_s if decode_s else 1.0,
        "categories": _by_category(jobs),
    }


def _by_category(jobs: Sequence[Job]) -> Json:
    names = sorted({job.fate.category.name for job in jobs})
    found: Json = {}
    for name in names:
        stats = [job.request.stats for job in jobs if job.fate.category.name == name]
        verifies = sum(stat.verifies for stat in stats)
        found[name] = {
            "requests": len(stats),
            "draft_length": sum(stat.drafted for stat in stats) / verifies if verifies else 0.0,
            "acceptance_length": sum(stat.emitted for stat in stats) / verifies if verifies else 1.0,
        }
    return found


def _prefix(run: Run) -> Json:
    prompts = sum(job.request.num_prompt for job in run.ended)
    cached = sum(job.request.stats.cached_prompt_tokens for job in run.ended)
    evictions = sum(replica.kv.stats.evictions for replica in run.replicas)
    return {"prompt_tokens": prompts, "cached": cached, "hit_rate": cached / prompts if prompts else 0.0, "evictions": evictions}


def _predicted(steps: Sequence[StepRecord]) -> Json | None:
    """How far the scheduler's expectation of a step's seconds was off; None where it has none."""
    errors = [abs(step.predicted_s / step.cost.total_s - 1) for step in steps if step.predicted_s is not None]
    return {"steps": len(errors), "median_error": float(np.median(errors))} if errors else None


def _course(run: Run) -> list[Json]:
    """The run in equal intervals: what was chosen and what came of it, all replicas together."""
    if not run.end_s:
        return []
    width = run.end_s / _INTERVALS
    buckets: list[list[StepRecord]] = [[] for _ in range(_INTERVALS)]
    for replica in run.replicas:
        for step in replica.steps:
            buckets[min(int(step.end_s / width), _INTERVALS - 1)].append(step)
    return [_interval((place + 1) * width, width, bucket, run) for place, bucket in enumerate(buckets)]


def _interval(end_s: float, width: float, steps: Sequence[StepRecord], run: Run) -> Json:
    rows = sum(step.decode_rows for step in steps)
    told = [step for step in steps if step.predicted_s is not None]
    predicted_s = sum(step.predicted_s or 0.0 for step in told)
    spent_s = sum(step.cost.total_s for step in steps) or 1.0

    def over_time(name: str) -> float:
        return float(sum(getattr(step, name) * step.cost.total_s for step in steps) / spent_s)

    return {
        "end_s": end_s,
        "steps": len(steps),
        "draft_length": sum(step.drafted for step in steps) / rows if rows else None,
        "accepted_length": sum(step.accepted for step in steps) / rows if rows else None,
        "tokens_per_s": sum(step.emitted for step in steps) / width,
        "running": over_time("running"),
        "waiting": over_time("waiting"),
        "predicted_over_observed": predicted_s / sum(step.cost.total_s for step in told) if told else None,
        "kv_used": over_time("kv_used") / run.replicas[0].kv.num_pages,
    }


def format_report(report: Json) -> str:
    """For a terminal."""
    case, requests, goodput, speculation = (report[name] for name in ("case", "requests", "goodput", "speculation"))
    refused = ", ".join(f"{count} {reason}" for reason, count in requests["refused"].items()) or "none"
    lines = [
        f"{case['trace']}, {case['policy']}, {case['profile']}",
        f"{requests['ended']} requests in {report['seconds']:.1f} simulated s, refused: {refused}, {requests['preemptions']} preemptions",
        f"{report['tokens_per_s']:.1f} tokens/s, goodput {goodput['tokens_per_s']:.1f} tokens/s and "
        f"{goodput['requests_per_s']:.2f} requests/s, {goodput['share']:.1%} of the requests within the targets",
        "",
        "milliseconds     " + "".join(f"{name:>11}" for name in ("mean", *(f"P{p}" for p in PERCENTILES))),
    ]
    for name, values in report["latency_s"].items():
        lines.append(f"  {name:<15}" + "".join(f"{1000 * value:11.1f}" for value in values.values()))
    total = sum(report["spent_s"].values()) or 1.0
    lines += [
        "",
        "seconds: " + ", ".join(f"{name} {seconds:.2f} ({seconds / total:.1%})" for name, seconds in report["spent_s"].items()),
        f"drafted {speculation['drafted']}, accepted {speculation['accepted']}: {speculation['draft_length']:.2f} nodes and "
        f"{speculation['acceptance_length']:.2f} tokens per verify, {speculation['steps']} steps; "
        f"estimated {speculation['estimated_speedup']:.2f} times as fast as without drafts",
        f"prefix cache: {report['prefix_cache']['hit_rate']:.1%} of {report['prefix_cache']['prompt_tokens']} prompt tokens",
    ]
    if report["predicted"]:
        lines.append(f"step seconds predicted with a median error of {report['predicted']['median_error']:.1%}")
    return "\n".join(lines)
