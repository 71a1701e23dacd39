"""`specdec simulate`: what a policy brings on real traffic, without the hardware."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from specdec.cli.output_file import OutputFile
from specdec.cli.status_line import StatusLine
from specdec.config import EngineConfig

_POSITIVE = click.FloatRange(min=1e-6, max=1e9)
_COUNT = click.IntRange(min=1)
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("simulate", short_help="Drive the scheduler on a traffic trace with a virtual clock.")
@click.option("--trace", type=_FILE, help="Azure CSV, Mooncake JSON lines, or ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS.")
@click.option(
    "--model-profile",
    "profile_name",
    default="h200-8b",
    show_default=True,
    help="h200-8b, h200-70b-tp4, h200-671b-tp8, cpu-135m, cpu-0.5b, or the JSON of 'specdec bench --json'.",
)
@click.option("--show-profile", is_flag=True, help="Print the profile's arithmetic and exit.")
@click.option("--policy", "policies", multiple=True, default=("auto",), show_default=True, help="off, auto, all, fixed:K; may be repeated.")
@click.option("--drafter", help="One of the profile's: ngram, head, model; the first of head, ngram that it has if not given.")
@click.option(
    "--acceptance", default="0.6", show_default=True, help="Chance of a draft token: a rate, rates per depth (0.8,0.7,0.5), or FILE.json."
)
@click.option("--replicas", type=_COUNT, default=1, show_default=True, help="Servers; a request goes to the least busy one.")
@click.option("--load", type=_POSITIVE, default=1.0, show_default=True, help="How many times as fast requests come.")
@click.option("--concurrency", type=_COUNT, help="Keep so many requests under way, whenever the trace's came.")
@click.option("--limit", type=_COUNT, help="Only the first so many requests.")
@click.option("--target-ttft", "ttft_ms", type=_POSITIVE, metavar="MS", help="Refuse requests whose first token would come later.")
@click.option(
    "--target-itl",
    "itl_ms",
    type=_POSITIVE,
    metavar="MS",
    help="Keep steps shorter; goodput is within both targets.",
)
@click.option("--max-num-seqs", type=_COUNT, help="Requests that run at once; the profile's if not given.")
@click.option("--max-batch-tokens", type=_COUNT, help="Token rows of one forward; the profile's if not given.")
@click.option("--max-queue", type=_COUNT, default=2**20, show_default=True, help="Requests that may wait; more are refused.")
@click.option("--num-pages", type=_COUNT, help="KV pages of 16 tokens; the profile's pool if not given.")
@click.option("--prefix-cache/--no-prefix-cache", default=True, show_default=True, help="Share the KV of equal prompt beginnings.")
@click.option(
    "--noise",
    type=click.FloatRange(min=0, max=10),
    default=0.0,
    show_default=True,
    help="Sigma of a lognormal factor on each step's seconds.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of acceptance and noise.")
@click.option("--json", "output", type=OutputFile(), help="Write the results there as JSON.")
@click.option("--plot", type=OutputFile(), help="Write their course there as SVG.")
def command(**options: Any) -> int:  # click's option values, each read by name below
    """Run a trace of real traffic through the engine's own scheduler and KV manager, with a virtual clock.

    What a device would give is computed: seconds from MODEL-PROFILE, and acceptance from --acceptance, the same luck for
    every --policy. All figures are simulated.
    """
    from specdec.scheduler.simulator.profiles import describe, load_profile

    profile = load_profile(options["profile_name"])
    if options["show_profile"]:
        click.echo(describe(profile))
        return 0
    if options["trace"] is None:
        raise click.UsageError("Missing option '--trace'.")
    options["drafter"] = options["drafter"] or next(name for name in ("head", *profile.drafters) if name in profile.drafters)
    if options["concurrency"] is not None and options["load"] != 1.0:
        raise click.UsageError("--load scales the trace's arrivals, and --concurrency does not use them: give one of them.")

    from specdec.scheduler.simulator.report import format_report

    reports = _run_all(profile, options)
    if options["output"] is not None:
        options["output"].write_text(json.dumps({"results": reports}, indent=2) + "\n", "utf-8")
    if options["plot"] is not None:
        from specdec.scheduler.simulator.course_chart import draw_courses

        options["plot"].write_text(draw_courses(reports), "utf-8")
    click.echo("\n\n".join(format_report(report) for report in reports))
    return 0


def _run_all(profile: Any, options: dict[str, Any]) -> list[dict[str, Any]]:  # Profile, option values and JSON values
    """A report for each policy."""
    from specdec.scheduler.simulator.acceptance_law import parse_acceptance
    from specdec.scheduler.simulator.report import build_report
    from specdec.scheduler.simulator.simulator import Policy, Scenario, simulate
    from specdec.scheduler.simulator.traces import read_trace, speed_up

    trace = speed_up(read_trace(options["trace"], options["limit"]), options["load"])
    categories = parse_acceptance(options["acceptance"])
    config = EngineConfig(
        drafter=options["drafter"],
        max_num_seqs=options["max_num_seqs"] or profile.max_num_seqs,
        max_batch_tokens=options["max_batch_tokens"] or profile.max_batch_tokens,
        max_queue=options["max_queue"],
        num_pages=options["num_pages"],
        prefix_cache=options["prefix_cache"],
        seed=options["seed"],
        target_ttft_ms=options["ttft_ms"],
        target_itl_ms=options["itl_ms"],
    )
    case = {name: str(value) if isinstance(value, Path) else value for name, value in options.items() if name not in _NOT_IN_CASE}
    reports = []
    line = StatusLine()
    for policy in [Policy.parse(text) for text in dict.fromkeys(options["policies"])]:
        scenario = Scenario(
            trace=trace,
            profile=profile,
            categories=categories,
            policy=policy,
            config=config,
            replicas=options["replicas"],
            concurrency=options["concurrency"],
            noise=options["noise"],
            seed=options["seed"],
        )
        run = simulate(scenario, partial(_show, line, policy.name))
        reports.append(build_report(run, scenario, {**case, "policy": policy.name, "engine": scenario.engine_config.to_dict()}))
        line.say(f"{policy.name}: {len(trace)} requests done")
    line.clear()
    return reports


def _show(line: StatusLine, policy: str, done: int, total: int) -> None:
    line.show(f"{policy}: {done} of {total} requests")


_NOT_IN_CASE = ("policies", "output", "plot", "show_profile")
