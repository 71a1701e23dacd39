"""Results of an evaluation as JSON and as a table. Arithmetic and text only; no torch, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.eval.acceptance import Answer, Evaluation, Run, Settings
from specdec.eval.machine import describe_machine, versions
from specdec.eval.tables import align, short_spec


def build_report(
    evaluation: Evaluation, config: EngineConfig, settings: Settings, *, data: Sequence[Path], limit: int | None
) -> dict[str, Any]:
    """The JSON object of `specdec eval acceptance --json`: the case, then one result per drafter, `off` first."""
    off = evaluation.runs[0]
    return {
        "case": {
            "config": {key: value for key, value in config.to_dict().items() if key != "drafter"},
            "model": evaluation.model_name,
            "data": [str(path) for path in data],
            "limit": limit,
            **asdict(settings),
            "requests": len(off.cases),
            "skipped": list(evaluation.skipped),
            "versions": versions(),
            "machine": describe_machine(),
            "figures": "observed",
        },
        "results": [_result(run, off, config, settings) for run in evaluation.runs],
    }


def _result(run: Run, off: Run, config: EngineConfig, settings: Settings) -> dict[str, Any]:
    differences = run.differences(off)
    pooled = pool(run.answers)
    return {
        "drafter": run.drafter,
        "rule": config.verify_rule,
        "temperature": settings.temperature,
        **pooled,
        "wall_s": run.wall_s,
        "other_s": max(0.0, run.wall_s - pooled["draft_s"] - pooled["verify_s"] - pooled["prefill_s"]),
        "tokens_per_s": run.tokens_per_s,
        "speedup": run.tokens_per_s / off.tokens_per_s if off.tokens_per_s else 0.0,
        "identical_to_off": not differences,
        "differing": len(differences),
        "first_divergence": asdict(differences[0]) if differences else None,
        "categories": {
            name: pool([answer for case, answer in zip(run.cases, run.answers, strict=True) if case.category == name])
            for name in dict.fromkeys(case.category for case in run.cases)
        },
    }


def pool(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counters summed over requests; ratios are of the sums. `tokens` are all ids, `emitted` those that verifies gave."""
    stats = [answer.stats for answer in answers]
    emitted, verifies = sum(s.emitted for s in stats), sum(s.verifies for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    return {
        "requests": len(answers),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "acceptance_length": emitted / verifies if verifies else 1.0,
        "acceptance_rate": accepted / drafted if drafted else None,
        "drafted": drafted,
        "accepted": accepted,
        "emitted": emitted,
        "verifies": verifies,
        "draft_s": sum(s.draft_s for s in stats),
        "verify_s": sum(s.verify_s for s in stats),
        "prefill_s": sum(s.prefill_s for s in stats),
    }


def format_table(report: dict[str, Any]) -> str:
    """The report as two tables: totals per drafter, then acceptance length per category."""
    results = report["results"]
    totals = [
        ["drafter", "accept len", "drafted", "accepted", "draft s", "verify s", "prefill s", "other s", "tokens/s", "speed-up", "ids = off"]
    ]
    for result in results:
        same = "yes" if result["identical_to_off"] else f"NO, {result['differing']} of {result['requests']} differ"
        seconds = [f"{result[key]:.2f}" for key in ("draft_s", "verify_s", "prefill_s", "other_s")]
        totals.append(
            [
                short_spec(result["drafter"]),
                f"{result['acceptance_length']:.2f}",
                str(result["drafted"]),
                str(result["accepted"]),
                *seconds,
                f"{result['tokens_per_s']:.1f}",
                f"{result['speedup']:.2f}x",
                same,
            ]
        )
    categories = [["accept len by category", "requests", *(short_spec(result["drafter"]) for result in results)]]
    for name, first in results[0]["categories"].items():
        lengths = [f"{result['categories'][name]['acceptance_length']:.2f}" for result in results]
        categories.append([name, str(first["requests"]), *lengths])
    budget = report["case"]["config"]["draft_budget"]
    note = "all of every draft is verified, whether it pays or not; --draft-budget auto lets the engine choose"
    parts = [align(totals), *([note] if budget == "all" else []), align(categories)]
    for result in results:
        if result["first_divergence"] is not None:
            at = result["first_divergence"]
            parts.append(
                f"{short_spec(result['drafter'])} first differs from off in {at['id']}, turn {at['turn'] + 1}, token {at['position']}: "
                f"{at['expected']} became {at['got']}"
            )
    return "\n\n".join(parts)
