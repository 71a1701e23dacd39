"""What `specdec bench` measured, as JSON and as tables. Arithmetic and text only; no torch, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.eval.acceptance import OFF
from specdec.eval.bench import HOST_DRAFTER, BenchSettings, Measurements
from specdec.eval.bench_decode import DecodeRun, Paired, rates
from specdec.eval.machine import describe_machine, versions
from specdec.eval.samples import Samples
from specdec.eval.tables import align, format_bytes, short_spec

Json = dict[str, Any]  # JSON values


def build_report(found: Measurements, config: EngineConfig, settings: BenchSettings, *, model_file: Path, data: Sequence[Path]) -> Json:
    """The JSON object of `specdec bench --json`. Every figure is a median; `_low` and `_high` are the quartiles beside it."""
    return {
        "case": {
            "config": {key: value for key, value in config.to_dict().items() if key != "drafter"},
            "model": found.model_name,
            "model_file": {"path": str(model_file), "bytes": _size(model_file)},
            "dtype": next(iter(found.weights)),
            "weight_bytes": found.weights,
            "parts": list(settings.parts),
            "drafters": list(settings.drafters),
            "repeats": settings.repeats,
            "max_tokens": settings.max_tokens,
            "data": [str(path) for path in data],
            "versions": versions(),
            "machine": {**describe_machine(), "busy_cores": found.busy_cores},
            "read_bandwidth": _bandwidth(found),
            "notes": found.notes,
            "figures": "observed",
        },
        "prefill": [{"tokens": tokens, **speeds.to_json("tokens_per_s")} for tokens, speeds in found.prefill.items()],
        "steps": _steps(found),
        "decode": [entry for batch, pairs in found.decode.items() for entry in _decode(batch, pairs)],
        "host_ms_per_step": [_host(batch, runs) for batch, runs in found.host.items()],
    }


def _size(path: Path) -> int:
    """Of a file, or of the weights in a folder."""
    return path.stat().st_size if path.is_file() else sum(item.stat().st_size for item in path.glob("*.safetensors"))


def _bandwidth(found: Measurements) -> Json | None:
    if found.steps is None:
        return None
    return {**found.steps.bandwidth.to_json("bytes_per_s"), "method": found.steps.bandwidth_method}


def _steps(found: Measurements) -> list[Json]:
    if found.steps is None:
        return []
    entries: list[Json] = []
    one = found.steps.seconds[1]
    for rows, seconds in found.steps.seconds.items():
        entry = {"rows": rows, "context": found.steps.context, **seconds.to_json("seconds"), "of_one_row": seconds.ratios(one).median}
        if rows == 1:
            entry |= found.steps.floor_share(sum(found.weights.values())).to_json("byte_floor_share")
        entries.append(entry)
    return entries


def _decode(batch: int, pairs: Sequence[Paired]) -> list[Json]:
    """`off` first, over the runs beside all drafters; a drafter's speed-up is the median over its pairs."""
    off = rates([run for pair in pairs for run in pair.off])
    entries: list[Json] = [{"batch": batch, "drafter": OFF, **off.to_json("tokens_per_s"), "speedup": 1.0, "identical_to_off": True}]
    for pair in pairs:
        if pair.drafter != OFF:
            speeds = rates(pair.runs).to_json("tokens_per_s")
            speedup = pair.speedup.to_json("speedup")
            entries.append({"batch": batch, "drafter": pair.drafter, **speeds, **speedup, "identical_to_off": pair.identical})
    return entries


def _host(batch: int, runs: Sequence[DecodeRun]) -> Json:
    costs = [cost for run in runs for cost in run.host]

    def median(part: str) -> float:
        return 1000 * Samples.of(getattr(cost, part) for cost in costs).median

    parts = {f"{name}_ms": median(f"{name}_s") for name in ("draft", "sample", "commit", "other")}
    total = Samples.of(1000 * cost.total_s for cost in costs)
    return {"batch": batch, "drafter": HOST_DRAFTER, **total.to_json("ms"), **parts}


def format_tables(report: Json) -> str:
    """The report for a terminal: one table per part, then what the bytes allow."""
    case = report["case"]
    machine = case["machine"]
    head = f"{case['model']}, {case['dtype']}, {machine['cpu']}, {machine['cores']} cores; medians, and where the middle half lies"
    parts = [head, _prefill_table(report), _steps_table(report), _decode_table(report), _host_table(report), "\n".join(case["notes"])]
    return "\n\n".join(part for part in parts if part)


def _prefill_table(report: Json) -> str:
    rows = [["prefill", "tokens/s", "middle half"]]
    rows += [[f"{e['tokens']} tokens", f"{e['tokens_per_s']:.1f}", _range(e, "tokens_per_s", "{:.1f}")] for e in report["prefill"]]
    return align(rows) if len(rows) > 1 else ""


def _steps_table(report: Json) -> str:
    steps = report["steps"]
    if not steps:
        return ""
    rows = [[f"step after {steps[0]['context']} tokens", "ms", "middle half", "of 1 row"]]
    for entry in steps:
        milliseconds = {key: 1000 * value for key, value in entry.items() if key.startswith("seconds")}
        name = f"{entry['rows']} {'row' if entry['rows'] == 1 else 'rows'}"
        rows.append([name, f"{1000 * entry['seconds']:.2f}", _range(milliseconds, "seconds", "{:.2f}"), f"{entry['of_one_row']:.2f}x"])
    case, one = report["case"], steps[0]
    read, bandwidth = sum(case["weight_bytes"].values()), case["read_bandwidth"]
    floor = (
        f"1 row reads {format_bytes(read)} of weights; {bandwidth['method']} reads {format_bytes(bandwidth['bytes_per_s'])}/s, "
        f"so that 1 row runs at {100 * one['byte_floor_share']:.0f} % of the speed that reading allows"
    )
    return f"{align(rows)}\n{floor}"


def _decode_table(report: Json) -> str:
    rows = [["decode", "batch", "tokens/s", "middle half", "speed-up", "ids = off"]]
    for entry in report["decode"]:
        same = "yes" if entry["identical_to_off"] else "NO"
        speed = [f"{entry['tokens_per_s']:.1f}", _range(entry, "tokens_per_s", "{:.1f}"), f"{entry['speedup']:.2f}x", same]
        rows.append([short_spec(entry["drafter"]), str(entry["batch"]), *speed])
    return align(rows) if len(rows) > 1 else ""


def _host_table(report: Json) -> str:
    rows = [["ms per step outside the forward", "batch", "all", "middle half", "draft", "sample", "commit", "other"]]
    for entry in report["host_ms_per_step"]:
        parts = [f"{entry[f'{name}_ms']:.2f}" for name in ("draft", "sample", "commit", "other")]
        rows.append([entry["drafter"], str(entry["batch"]), f"{entry['ms']:.2f}", _range(entry, "ms", "{:.2f}"), *parts])
    return align(rows) if len(rows) > 1 else ""


def _range(entry: Json, name: str, form: str) -> str:
    return f"{form.format(entry[f'{name}_low'])} - {form.format(entry[f'{name}_high'])}"
