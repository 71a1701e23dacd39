"""Profiles from measurements: of this project's machine, or of a file that `specdec bench` or the engine's warm-up wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError
from specdec.scheduler.cost_table import CostTable
from specdec.scheduler.simulator.costs import HostCost, MeasuredForward
from specdec.scheduler.simulator.profile import NGRAM, Profile

Json = dict[str, Any]  # JSON values

_LENGTH = 4096  # tokens of KV per request that may run
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SEQS, _BATCH = 16, 512
_HOST = HostCost(step_s=240e-6, row_s=30e-6, sample_s=380e-6, sample_row_s=20e-6, commit_row_s=13e-6)


def cpu_135m() -> Profile:
    times = (10.39, 12.38, 11.25, 19.75, 31.53, 55.85, 99.19)
    return _cpu("cpu-135m", "SmolLM2 135M", times, ((128, 930.9), (512, 695.4), (2048, 482.6)))


def cpu_500m() -> Profile:
    times = (26.69, 27.90, 29.86, 47.25, 86.13, 164.99, 291.90)
    return _cpu("cpu-0.5b", "Qwen2.5 Coder 0.5B", times, ((128, 274.3), (512, 285.8), (2048, 218.2)))


def _cpu(name: str, model: str, milliseconds: Sequence[float], prefill: Sequence[tuple[int, float]]) -> Profile:
    """What `specdec bench` measured on one core of an AMD EPYC with AMX: steps of `_ROWS` rows behind 256 tokens, and prefill."""
    times_s = [ms / 1000 for ms in milliseconds]
    forward = MeasuredForward(_ROWS, times_s, 256, *_beyond(_ROWS, times_s, prefill))
    about = f"measured: {model} in int8 on one core of an AMD EPYC that other programs were using; drafter: ngram"
    return Profile(name, about, "measured", forward, {"ngram": NGRAM}, _HOST, _SEQS * _LENGTH, _SEQS, _BATCH)


def read_profile(path: Path) -> Profile:
    """The profile in a JSON file of `specdec bench --json`, or in one of the cache folder `costs`.

    Raises:
        ConfigError: the file cannot be read or holds neither.
    """
    try:
        values = json.loads(path.read_text("utf-8"))
        return _from_costs(path.stem, values) if "table" in values else _from_bench(path.stem, values)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{path} is no profile: wanted the JSON of `specdec bench --json` with its steps and prefill, or of the cache folder costs, "
            f"got {type(error).__name__} {error}"
        ) from error


def _from_costs(name: str, values: Json) -> Profile:
    """Of what the engine's warm-up measured."""
    table = CostTable.from_dict(values["table"])
    token_s, _ = _beyond(table.tokens, table.seconds, ())
    forward = MeasuredForward(table.tokens, table.seconds, 0, token_s, kv_token_s=table.kv_token_s)
    about = f"measured by the warm-up of {Path(str(values['key']['source'])).name}; drafter: ngram"
    return Profile(name, about, "measured", forward, {"ngram": NGRAM}, _HOST, _SEQS * _LENGTH, _SEQS, _BATCH)


def _from_bench(name: str, report: Json) -> Profile:
    """Of what `specdec bench` measured: steps by their rows, prefill, and host time."""
    steps = sorted(report["steps"], key=lambda entry: int(entry["rows"]))
    rows, times_s = [int(entry["rows"]) for entry in steps], [float(entry["seconds"]) for entry in steps]
    prefill = [(int(entry["tokens"]), float(entry["tokens_per_s"])) for entry in report["prefill"]]
    forward = MeasuredForward(rows, times_s, int(steps[0]["context"]), *_beyond(rows, times_s, prefill))
    case, config = report["case"], report["case"]["config"]
    machine = f"{case['machine']['cores']} cores of {case['machine']['cpu']}"
    about = f"measured by specdec bench: {Path(case['model']).name} in {case['dtype']} on {machine}; drafter: ngram"
    seqs, tokens = int(config["max_num_seqs"]), int(config["max_batch_tokens"])
    host = _host_of(report["host_ms_per_step"])
    return Profile(name, about, "measured", forward, {"ngram": NGRAM}, host, seqs * _LENGTH, seqs, tokens)


def _beyond(rows: Sequence[int], times_s: Sequence[float], prefill: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds per token row past the largest step, and per attended pair beyond.

    A prompt of n tokens takes a n + b n^2 / 2, as every token attends to those before it: two lengths of prefill (tokens,
    tokens/s) tell a and b. With fewer the last two steps tell a.
    """
    if len(prefill) < 2:
        return max(0.0, (times_s[-1] - times_s[-2]) / (rows[-1] - rows[-2])), 0.0
    (short, short_rate), (long, long_rate) = min(prefill), max(prefill)
    pair_s = max(0.0, 2 * (1 / long_rate - 1 / short_rate) / (long - short))
    return max(0.0, 1 / short_rate - pair_s * short / 2), pair_s


def _host_of(entries: list[Json]) -> HostCost:
    """Per step and per row, from the fewest and the most requests at once."""
    if not entries:
        return _HOST
    few, many = min(entries, key=lambda e: int(e["batch"])), max(entries, key=lambda e: int(e["batch"]))
    step_s, row_s = _line(few, many, "other_ms")
    sample_s, sample_row_s = _line(few, many, "sample_ms")
    return HostCost(step_s, row_s, sample_s, sample_row_s, commit_row_s=float(many["commit_ms"]) / 1000 / int(many["batch"]))


def _line(few: Json, many: Json, part: str) -> tuple[float, float]:
    """Seconds at no request and per request, neither below 0."""
    rows = int(many["batch"]) - int(few["batch"])
    slope = max(0.0, (float(many[part]) - float(few[part])) / rows) if rows else 0.0
    return max(0.0, float(few[part]) - slope * int(few["batch"])) / 1000, slope / 1000
