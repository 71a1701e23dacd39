"""`specdec bench`: how fast a model runs on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from specdec.cli.options import engine_options
from specdec.cli.output_file import OutputFile
from specdec.cli.status_line import StatusLine
from specdec.config import EngineConfig


def _run_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "bench": {name: [str(item) for item in value] if name == "data" else value for name, value in options.items() if name != "output"}
    }


@click.command("bench", short_help="Measure prefill, step and decoding speed.")
@engine_options(without=("drafter",), extra=_run_options)
@click.option("--only", "parts", multiple=True, type=click.Choice(("prefill", "steps", "decode")), help="Only this part; may be repeated.")
@click.option(
    "--drafter", "drafters", multiple=True, default=("ngram",), show_default=True, help="A drafter spec to decode with; may be repeated."
)
@click.option(
    "--data", multiple=True, type=click.Path(path_type=Path), help="Prompts to decode, as for `specdec eval acceptance`; may be repeated."
)
@click.option("--max-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="The most tokens decoded per prompt.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Of everything; alternatives take turns in each.")
@click.option("--json", "output", type=OutputFile(), help="Write the results there as JSON.")
def command(
    config: EngineConfig,
    parts: tuple[str, ...],
    drafters: tuple[str, ...],
    data: tuple[Path, ...],
    max_tokens: int,
    repeats: int,
    output: Path | None,
) -> int:
    """Measure MODEL: prefill, the cost of a step by its rows, decoding with and without drafters, time outside the forward.

    What is compared takes turns, and figures are medians, since machines are noisy. The status is 1 where a drafter's
    ids were not those of 'off'.
    """
    from specdec.eval.bench import PARTS, BenchSettings, check_settings, run_bench
    from specdec.eval.bench_prompts import SHIPPED
    from specdec.eval.datasets import load_prompts

    chosen = tuple(spec for spec in dict.fromkeys(drafters) if spec != "off")  # `off` always runs
    settings = BenchSettings(tuple(part for part in PARTS if part in parts or not parts), chosen, repeats, max_tokens)
    check_settings(settings)
    rows = load_prompts(data) if data else SHIPPED

    from specdec.eval.bench_report import build_report, format_tables
    from specdec.models import resolve_source

    line = StatusLine()
    found = run_bench(config, settings, rows, say=line.say, show=line.show)
    line.clear()
    report = build_report(found, config, settings, model_file=resolve_source(config.model), data=data)
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    click.echo(format_tables(report))
    return 0 if all(entry["identical_to_off"] for entry in report["decode"]) else 1
