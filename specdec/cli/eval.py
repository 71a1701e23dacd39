"""`specdec eval`: measure drafters and dtypes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from specdec.cli.options import engine_options
from specdec.cli.output_file import OutputFile
from specdec.cli.status_line import StatusLine
from specdec.config import DTYPES, EngineConfig
from specdec.errors import ConfigError


@click.group("eval", short_help="Measure drafters on real prompts, and what a dtype costs in quality.")
def command() -> None:
    """Measure drafters on real prompts, and what a dtype costs in quality."""


def _run_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "eval": {name: [str(item) for item in value] if name == "data" else value for name, value in options.items() if name != "output"}
    }


@command.command("acceptance", short_help="Acceptance length, speed, and identity with 'off'.")
@engine_options(without=("drafter",), defaults={"draft_budget": "all"}, extra=_run_options)
@click.option("--drafter", "drafters", multiple=True, required=True, help="A drafter spec; may be repeated.")
@click.option(
    "--data",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help='JSON lines of {"id", "category", "turns"}; may be repeated.',
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many rows of each file.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="The most tokens of one turn.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy; row i is sampled with seed --seed + i.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Requests in flight at once.")
@click.option("--json", "output", type=OutputFile(), help="Write the results there as JSON.")
def acceptance(
    config: EngineConfig,
    drafters: tuple[str, ...],
    data: tuple[Path, ...],
    limit: int | None,
    max_tokens: int,
    temperature: float,
    batch: int,
    output: Path | None,
) -> int:
    """Run MODEL without a drafter and with each --drafter, on the same prompts and seeds.

    Prints acceptance length per category, where the seconds went, speed against 'off', and whether the ids were those
    of 'off'. The status is 1 where they were not. All that a drafter proposes is verified, so that the drafter is measured
    and not the engine's choice, which may be to draft less or nothing: for that, --draft-budget auto.
    """
    from specdec.drafters.registry import check_spec

    for spec in drafters:
        check_spec(spec)
    drafters = tuple(spec for spec in dict.fromkeys(drafters) if spec != "off")  # `off` always runs, and first
    if batch > config.max_num_seqs:
        raise ConfigError(f"--batch {batch} needs --max-num-seqs of at least {batch}, got {config.max_num_seqs}")

    from specdec.eval.acceptance import Settings, run_acceptance
    from specdec.eval.datasets import load_prompts
    from specdec.eval.report import build_report, format_table

    rows = load_prompts(data, limit)
    settings = Settings(max_tokens=max_tokens, temperature=temperature, seed=config.seed, batch=batch)
    line = StatusLine()
    evaluation = run_acceptance(config, drafters, rows, settings, say=line.say, progress=line.progress)
    line.clear()
    report = build_report(evaluation, config, settings, data=data, limit=limit)
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    click.echo(format_table(report))
    return 0 if all(result["identical_to_off"] for result in report["results"]) else 1


@command.command("perplexity", short_help="What a dtype costs in quality.")
@click.argument("model", default=EngineConfig.model, metavar="[MODEL]")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    default=("auto", "float32"),
    show_default=True,
    help="May be repeated; changes are against the last.",
)
@click.option("--text", "texts", multiple=True, type=click.Path(path_type=Path), help="Plain text; may be repeated.")
@click.option(
    "--data",
    multiple=True,
    type=click.Path(path_type=Path),
    help='JSON lines of {"turns"} or {"prompt", "completion"}; may be repeated.',
)
@click.option("--bytes", "num_bytes", type=click.IntRange(min=100), default=50_000, show_default=True, help="Of all files together.")
@click.option("--context", type=click.IntRange(min=2), default=1024, show_default=True, help="Tokens of a chunk; each starts afresh.")
@click.option("--json", "output", type=OutputFile(), help="Write the results there as JSON.")
def perplexity(
    model: str, dtypes: tuple[str, ...], texts: tuple[Path, ...], data: tuple[Path, ...], num_bytes: int, context: int, output: Path | None
) -> int:
    """Score real text with MODEL in each --dtype, by the forward that generates."""
    if not texts and not data:
        raise ConfigError("no text to score: give --text or --data")

    from specdec.eval.perplexity import build_report, format_table, read_text, run_perplexity

    found = read_text(texts, data, num_bytes)
    line = StatusLine()
    results = run_perplexity(model, dtypes, found, context, say=line.say, show=line.show)
    line.clear()
    report = build_report(model, results, context, (*texts, *data), num_bytes)
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    click.echo(format_table(report))
    return 0
