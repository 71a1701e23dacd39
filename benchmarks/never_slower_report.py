"""What the runs of `never_slower.py` come to: failures, a table, and charts. Arithmetic and text only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.eval.samples import Samples
from specdec.scheduler.simulator.chart import Line, Panel, draw

AUTO = "auto"
ENOUGH = 0.97
WINDOW = 16  # steps over which goodput is compared
DOTS = 400  # per line of a chart
Step = tuple[float, float, float, int]  # predicted and observed seconds, expected and emitted tokens


@dataclass(frozen=True)
class Run:
    """One policy over the prompts of one round at one concurrency.

    Attributes:
        tokens: emitted, over all requests.
        wall_s: from the first request to the last token.
        busy_cores: that other programs used just before the policies of this round took their turns.
        ids: digest of what was emitted.
        steps: of `auto` alone.
    """

    round: int
    concurrency: int
    policy: str
    tokens: int
    wall_s: float
    drafted: int
    accepted: int
    busy_cores: float
    ids: str
    steps: tuple[Step, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def speeds_of(runs: Iterable[Run], concurrency: int, policy: str) -> Samples:
    """Tokens per second, one measurement per round."""
    return Samples.of(run.tokens_per_s for run in _in_order(runs) if (run.concurrency, run.policy) == (concurrency, policy))


def ratios_of(runs: Sequence[Run], concurrency: int, others: Iterable[str]) -> dict[str, Samples]:
    """Policy -> speed of `auto` over its speed, round by round."""
    own = speeds_of(runs, concurrency, AUTO)
    return {policy: own.ratios(speeds_of(runs, concurrency, policy)) for policy in others}


def failures(runs: Sequence[Run], policies: Sequence[str]) -> list[str]:
    """What does not hold."""
    found = []
    for round_, concurrency in sorted({(run.round, run.concurrency) for run in runs}):
        ids = {run.policy: run.ids for run in runs if (run.round, run.concurrency) == (round_, concurrency)}
        differing = sorted(policy for policy in ids if ids[policy] != ids[min(ids)])
        if differing:
            found.append(f"round {round_ + 1}, {concurrency} at once: the ids of {', '.join(differing)} differ from those of {min(ids)}")
    if AUTO in policies:
        for concurrency in sorted({run.concurrency for run in runs}):
            ratios = ratios_of(runs, concurrency, [policy for policy in policies if policy != AUTO])
            slow = {policy: one.median for policy, one in ratios.items() if one.median < ENOUGH}
            found += [f"{concurrency} at once: auto reaches {ratio:.3f} of {policy}" for policy, ratio in slow.items()]
    return found


def table(runs: Sequence[Run], policies: Sequence[str]) -> str:
    """Markdown: a line per concurrency."""
    others = [policy for policy in policies if policy != AUTO]
    columns = ["at once", "rounds", *(f"{policy}, tokens/s" for policy in policies)]
    columns += ["auto drafted", "accepted", "auto / best other", "quartiles"]
    lines = [_row(columns), "|" + "---|" * len(columns)]
    for concurrency in sorted({run.concurrency for run in runs}):
        medians = {policy: speeds_of(runs, concurrency, policy).median for policy in policies}
        count = len({run.round for run in runs if run.concurrency == concurrency})
        row = [str(concurrency), str(count), *(f"{speed:.1f}" for speed in medians.values())]
        own = [run for run in runs if (run.concurrency, run.policy) == (concurrency, AUTO)]
        row += [str(sum(run.drafted for run in own)), str(sum(run.accepted for run in own))]
        ratios = ratios_of(runs, concurrency, others) if own else {}
        if ratios:
            best = min(ratios, key=lambda policy: ratios[policy].median)
            low, high = ratios[best].middle_half
            row += [f"{ratios[best].median:.3f} ({best})", f"{low:.3f} to {high:.3f}"]
        lines.append(_row([*row, *["-"] * (len(columns) - len(row))]))
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def chart(runs: Sequence[Run], policies: Sequence[str]) -> str:
    """Speed of all policies, and how well `auto` predicted its steps."""
    levels = sorted({run.concurrency for run in runs})
    best = {level: max(speeds_of(runs, level, policy).median for policy in policies) for level in levels}
    speeds = [
        Line(policy, [(level, speeds_of(runs, level, policy).median / best[level]) for level in levels], bold=policy == AUTO)
        for policy in policies
    ]
    panels = [Panel("tokens/s over that of the best, medians", "requests under way", speeds, log_x=True, y_from_zero=False)]
    steps = {level: [step for run in _in_order(runs) if run.concurrency == level for step in run.steps] for level in levels}
    windows = {level: list(goodputs(own)) for level, own in steps.items()}
    seconds = {level: [(predicted, observed) for predicted, observed, _, _ in own] for level, own in steps.items()}
    panels.append(_scatter("observed against predicted seconds of steps", "predicted seconds", seconds))
    panels.append(_scatter(f"observed against predicted goodput, {WINDOW} steps each", "predicted tokens/s", windows))
    course = [
        Line(f"{level} at once", [(float(WINDOW * place), own[0] / own[1]) for place, own in enumerate(_window_seconds(steps[level]))])
        for level in levels
    ]
    panels.append(
        Panel(f"predicted over observed seconds, {WINDOW} steps each", "steps of auto so far", course, y_from_zero=False, log_y=True)
    )
    return draw(panels)


def _scatter(title: str, x_label: str, points: dict[int, list[tuple[float, float]]]) -> Panel:
    values = [value for own in points.values() for point in own for value in point]
    equal = [(edge, edge) for edge in (min(values), max(values))] if values else []
    lines = [Line(f"{level} at once", _thinned(own), dots=True) for level, own in points.items()]
    return Panel(title, x_label, [*lines, Line("equal", equal)], log_x=True, log_y=True, height=420)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[:: max(1, -(-len(points) // DOTS))]


def _window_seconds(steps: Sequence[Step]) -> Iterable[tuple[float, float]]:
    """(predicted, observed) seconds of so many steps at a time."""
    for own in _windows(steps):
        yield sum(step[0] for step in own), sum(step[1] for step in own)


def goodputs(steps: Sequence[Step]) -> Iterable[tuple[float, float]]:
    """(predicted, observed) tokens per second, `WINDOW` steps at a time; windows in which nothing was emitted are left out."""
    for own in _windows(steps):
        predicted_s, observed_s, expected, emitted = (sum(column) for column in zip(*own, strict=True))
        if emitted:
            yield expected / predicted_s, emitted / observed_s


def _windows(steps: Sequence[Step]) -> Iterable[Sequence[Step]]:
    return (steps[start : start + WINDOW] for start in range(0, len(steps) - WINDOW + 1, WINDOW))


def errors_line(runs: Sequence[Run]) -> str:
    """How far the predictions were off."""
    steps = [step for run in runs for step in run.steps]
    if not steps:
        return ""
    seconds = statistics.median(abs(predicted / observed - 1) for predicted, observed, _, _ in steps)
    goodput = [abs(predicted / observed - 1) for run in runs for predicted, observed in goodputs(run.steps)]
    told = f"; of the goodput of {WINDOW} steps {statistics.median(goodput):.3f}" if goodput else ""
    return f"median |predicted / observed - 1| of the seconds of {len(steps)} steps of auto: {seconds:.3f}{told}"


def _in_order(runs: Iterable[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (run.round, run.concurrency))
