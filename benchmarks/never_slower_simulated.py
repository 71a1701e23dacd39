"""Simulated: is `auto` ever slower than the best fixed draft length? Goodput over traces, acceptance rates and load.

    python benchmarks/never_slower_simulated.py TRACE ... [--profile h200-8b] [--drafter head] [--json FILE] [--markdown FILE] [--plot FILE]

A load is the number of requests under way: as one ends, the trace's next one comes. With `--arrivals` it is how many times as
fast requests come as in the trace, and only those within `--target-ttft` and `--target-itl` count. Every policy meets the
same requests and the same luck. The status is 1 where `auto` reaches less than 0.99 of the best other policy, or where over the
whole sweep (the mean of its goodput over the best one's at each point) it is not better than each of them. Runs that the file of
`--json` holds already are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from specdec.config import EngineConfig
from specdec.scheduler.simulator.acceptance_law import Category
from specdec.scheduler.simulator.chart import Line, Panel, draw
from specdec.scheduler.simulator.profiles import load_profile
from specdec.scheduler.simulator.report import build_report
from specdec.scheduler.simulator.simulator import Policy, Scenario, simulate
from specdec.scheduler.simulator.traces import read_trace, speed_up

AUTO = "auto"
OTHERS = ("off", *(f"fixed:{length}" for length in (1, 2, 3, 4, 5, 7)))
ENOUGH = 0.99
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SPEEDS = (0.05, 0.25, 1, 2, 3, 4, 6, 8)
REQUESTS_PER_SLOT, FEWEST_REQUESTS = 6, 64
ARRIVALS = 600
Point = tuple[str, float, float]  # trace, acceptance rate, load
Runs = dict[Point, dict[str, dict[str, float]]]  # point -> policy -> figures


def run_point(arguments: argparse.Namespace, path: Path, acceptance: float, load: float, policy: str) -> dict[str, float]:
    profile = load_profile(arguments.profile)
    concurrency = None if arguments.arrivals else int(load)
    limit = ARRIVALS if concurrency is None else max(FEWEST_REQUESTS, REQUESTS_PER_SLOT * concurrency)
    trace = read_trace(path, limit)
    config = EngineConfig(
        drafter=arguments.drafter,
        max_num_seqs=profile.max_num_seqs,
        max_batch_tokens=profile.max_batch_tokens,
        max_queue=2**20,
        target_ttft_ms=arguments.target_ttft if arguments.arrivals else None,
        target_itl_ms=arguments.target_itl if arguments.arrivals else None,
    )
    scenario = Scenario(
        trace=speed_up(trace, load) if concurrency is None else trace,
        profile=profile,
        categories=[Category("all", (acceptance,))],
        policy=Policy.parse(policy),
        config=config,
        concurrency=concurrency,
        noise=arguments.noise,
        seed=arguments.seed,
    )
    report = build_report(simulate(scenario), scenario, {"policy": policy})
    return {
        "tokens_per_s": report["goodput"]["tokens_per_s"],
        "draft_length": report["speculation"]["draft_length"],
        "itl_p50_s": report["latency_s"]["itl"]["p50"],
        "ttft_p50_s": report["latency_s"]["ttft"]["p50"],
    }


def run_all(arguments: argparse.Namespace) -> Runs:
    """Every point and policy; those in the JSON file are taken from there."""
    runs = _load_runs(arguments.json)
    points = list(itertools.product(arguments.traces, arguments.acceptance, arguments.loads))
    for place, (path, acceptance, load) in enumerate(points):
        found = runs.setdefault((path.stem, acceptance, load), {})
        for policy in arguments.policies:
            if policy not in found:
                found[policy] = run_point(arguments, path, acceptance, load, policy)
        speeds = ", ".join(f"{policy} {figures['tokens_per_s']:.0f}" for policy, figures in found.items())
        print(f"[{place + 1}/{len(points)}] {path.stem}, {acceptance}, {load:g}: {speeds}", file=sys.stderr, flush=True)
        if arguments.json is not None:
            _save_runs(arguments.json, arguments, runs)
    return {(path.stem, acceptance, load): runs[path.stem, acceptance, load] for path, acceptance, load in points}


def _load_runs(path: Path | None) -> Runs:
    if path is None or not path.exists():
        return {}
    entries = json.loads(path.read_text("utf-8"))["points"]
    return {(entry["trace"], entry["acceptance"], entry["load"]): entry["policies"] for entry in entries}


def _save_runs(path: Path, arguments: argparse.Namespace, runs: Runs) -> None:
    case = {name: getattr(arguments, name) for name in ("profile", "drafter", "arrivals", "target_ttft", "target_itl", "noise", "seed")} | {
        "figures": "simulated"
    }
    points = [
        {"trace": trace, "acceptance": acceptance, "load": load, "policies": found} for (trace, acceptance, load), found in runs.items()
    ]
    path.write_text(json.dumps({"case": case, "points": points}, indent=1) + "\n", "utf-8")


def best_of(found: dict[str, dict[str, float]], policies: Sequence[str]) -> str:
    return max(policies, key=lambda policy: found[policy]["tokens_per_s"])


def overall(runs: Runs, policy: str, policies: Sequence[str]) -> float:
    """Mean over the points of the policy's goodput over the best one's."""
    return statistics.mean(ratios(runs, policy, policies))


def ratios(runs: Runs, policy: str, policies: Sequence[str]) -> list[float]:
    """At each point, the policy's goodput over that of the best of `policies`."""
    return [found[policy]["tokens_per_s"] / found[best_of(found, policies)]["tokens_per_s"] for found in runs.values()]


def table(runs: Runs, policies: Sequence[str]) -> str:
    """Markdown: a summary per policy, then a line per point."""
    others = [policy for policy in policies if policy != AUTO]
    lines = ["| policy | of the best at each point, on average | at its worst point |", "|---|---|---|"]
    lines += [f"| {policy} | {overall(runs, policy, policies):.3f} | {min(ratios(runs, policy, policies)):.3f} |" for policy in policies]
    lines += ["", "| trace | acceptance | load | off, tokens/s | best other | tokens/s | auto, tokens/s | draft length | auto / best |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for (trace, acceptance, load), found in runs.items():
        best = best_of(found, others)
        off, top = found["off"]["tokens_per_s"], found[best]["tokens_per_s"]
        own = found.get(AUTO, found[best])
        lines.append(
            f"| {trace} | {acceptance} | {load:g} | {off:.0f} | {best} | {top:.0f} | {own['tokens_per_s']:.0f} | "
            f"{own['draft_length']:.2f} | {own['tokens_per_s'] / top:.3f} |"
        )
    return "\n".join(lines) + "\n"


def chart(runs: Runs, policies: Sequence[str], arrivals: bool) -> str:
    """A panel per trace and acceptance: goodput of every policy over that of the best one there."""
    axis = "times as fast as in the trace" if arrivals else "requests under way"
    panels = []
    for trace, acceptance in dict.fromkeys((trace, acceptance) for trace, acceptance, _ in runs):
        points = {load: found for (own, rate, load), found in runs.items() if (own, rate) == (trace, acceptance)}
        lines = [
            Line(
                policy,
                [(load, found[policy]["tokens_per_s"] / found[best_of(found, policies)]["tokens_per_s"]) for load, found in points.items()],
                bold=policy == AUTO,
            )
            for policy in policies
        ]
        title = f"{trace}, acceptance {acceptance}: goodput over that of the best"
        panels.append(Panel(title, axis, lines, log_x=True, y_from_zero=False))
    return draw(panels)


def failures(runs: Runs, policies: Sequence[str]) -> list[str]:
    """What `auto` does not hold."""
    others = [policy for policy in policies if policy != AUTO]
    found = []
    for point, figures in runs.items():
        best = best_of(figures, others)
        ratio = figures[AUTO]["tokens_per_s"] / figures[best]["tokens_per_s"]
        if ratio < ENOUGH:
            found.append(f"{point}: {ratio:.3f} of {best}")
    own = overall(runs, AUTO, policies)
    found += [f"over the whole sweep {policy} is no worse" for policy in others if overall(runs, policy, policies) >= own]
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--profile", default="h200-8b")
    parser.add_argument("--drafter", default="head")
    parser.add_argument("--acceptance", type=float, nargs="+", default=(0.3, 0.6, 0.85))
    parser.add_argument("--arrivals", action="store_true", help="let requests come as in the trace, load times as fast")
    parser.add_argument("--loads", type=float, nargs="+", help="default: 1 to 256 requests; 0.05 to 8 times as fast with --arrivals")
    parser.add_argument("--target-ttft", type=float, default=1000, metavar="MS", help="with --arrivals")
    parser.add_argument("--target-itl", type=float, default=25, metavar="MS", help="with --arrivals")
    parser.add_argument("--policies", nargs="+", default=(*OTHERS, AUTO))
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args(argv)
    arguments.loads = arguments.loads or (SPEEDS if arguments.arrivals else CONCURRENCY)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    runs = run_all(arguments)
    text = table(runs, arguments.policies)
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text, "utf-8")
    if arguments.plot is not None:
        arguments.plot.write_text(chart(runs, arguments.policies, arguments.arrivals), "utf-8")
    found = failures(runs, arguments.policies) if AUTO in arguments.policies else []
    print("\n".join(found) or "auto holds everywhere", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
