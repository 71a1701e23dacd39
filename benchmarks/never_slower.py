"""Real: is `auto` ever slower than the best fixed draft length? Tokens per second of a model, by requests under way.

    python benchmarks/never_slower.py --model MODEL --drafter SPEC --prompts FILE.jsonl [--concurrency 1 2 4 8 16]
        [--policies auto off 1 2 3 4 5 7] [--rounds 5] [--minutes 15] [--json FILE] [--markdown FILE] [--plot FILE]
    python benchmarks/never_slower.py --hostile --model MODEL --prompts FILE.jsonl [--max-tokens 200] [--rounds 3]

In every round and at every concurrency all policies answer the same prompts, in shuffled order, prefill included, and each begins
with an empty prefix cache. They share one engine, but each has a scheduler of its own, which keeps what it has learned from one run
to the next, as that of a server does. Compared are policies of the same round. The status is 1 where `auto` reaches less than 0.97 of
another policy, by the median over the rounds, or where the ids of two policies differ. Runs that the file of `--json` holds are not
run again, but what `auto` had learned in them is lost.

`--hostile`: a drafter that is always wrong and sleeps four plain steps whenever it is asked. The status is 1 where a run takes more
than 1.1 times as long as without it, or where drafting has not resumed within 64 tokens once it is always right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from never_slower_report import AUTO, Run, Step, chart, errors_line, failures, table

from specdec.drafters.base import Drafter, DraftRow
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.eval.datasets import load_prompts, spread_prompts
from specdec.eval.machine import BUSY_CORES, busy_cores, describe_machine, versions
from specdec.llm import LLM
from specdec.plan import BatchPlan, Event, RowOutcome, StepCost
from specdec.request import SamplingParams
from specdec.scheduler.flat_drafts import FlatDrafts
from specdec.scheduler.node_choice import node_chances
from specdec.scheduler.scheduler import Scheduler
from specdec.testing import Anti, Oracle
from specdec.tree import DraftTree

OFF = "off"
TURNS = 3  # requests per place, at least: a run that only drains is measured by its longest answers
SLEEP_STEPS, HOSTILE_MOST, RESUMES_WITHIN = 4, 1.1, 64
CASE = ("model", "drafter", "prompts", "requests", "max_tokens", "longest", "seed")
Say = Callable[[str], None]


class RecordingScheduler(Scheduler):
    """Keeps what each step was predicted to take and to bring, and what it did.

    Attributes:
        steps: so far.
        spent_s: seconds that this took in the last step.
    """

    steps: list[Step]
    spent_s: float

    def finish(self, plan: BatchPlan, trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome], cost: StepCost) -> list[Event]:
        start = time.perf_counter()
        assert plan.predicted is not None
        expected = float(sum(row.emits for row in plan.rows))
        drafted = [(row, tree.shape()) for row, tree in zip(plan.rows, trees, strict=True) if len(tree)]
        if drafted:
            rows, shapes = zip(*drafted, strict=True)
            expected += float(node_chances(rows, shapes, FlatDrafts.of(shapes), self._budget.acceptance).sum())
        emitted = sum(len(outcome.emitted) for outcome in outcomes)
        self.steps.append((round(plan.predicted.total_s, 6), round(cost.total_s, 6), round(expected, 3), emitted))
        self.spent_s = time.perf_counter() - start
        return super().finish(plan, trees, outcomes, cost)


def make_scheduler(engine: Engine, budget: str | int, say: Say, *, records: bool) -> Scheduler:
    """A scheduler that knows what the engine's own knew when it started."""
    config = replace(engine.config, draft_budget=budget)
    clock, catch_up = engine.target.backend.clock, engine.scheduler._catch_up
    kind = RecordingScheduler if records else Scheduler
    own = kind(config, engine.kv, engine.drafters.default_limit, engine.drafters.forget, clock, catch_up=catch_up)
    if isinstance(own, RecordingScheduler):
        own.steps, own.spent_s = [], 0.0
    engine.scheduler = own
    engine.warm_up(say)
    return own


def answer(engine: Engine, spec: str, prompts: Sequence[list[int]], concurrency: int, params: SamplingParams) -> dict[str, Any]:
    """Generates for all prompts, `concurrency` of them at a time; the fields of a Run that come of it, and the `outputs`."""
    engine.reset_prefix_cache()
    queue = deque(prompts)
    outputs: dict[str, list[int]] = {}
    running: set[str] = set()
    drafted = accepted = 0
    recorder = engine.scheduler if isinstance(engine.scheduler, RecordingScheduler) else None
    start = time.perf_counter()
    while queue or running:
        while queue and len(running) < concurrency:
            (name,) = engine.add(queue.popleft(), params, drafter=spec)
            outputs[name] = []
            running.add(name)
        events = engine.step()
        if recorder is not None:  # what the recording takes is nobody's
            start += recorder.spent_s
            engine._tail_s -= recorder.spent_s
        for event in events:
            outputs[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                if event.error is not None:
                    raise SystemExit(f"{spec}: a request failed: {event.error}")
                running.remove(event.request_id)
                drafted, accepted = drafted + event.stats.drafted, accepted + event.stats.accepted
    wall_s = time.perf_counter() - start
    found = list(outputs.values())
    ids = hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()
    return {"tokens": sum(map(len, found)), "wall_s": wall_s, "drafted": drafted, "accepted": accepted, "ids": ids, "outputs": found}


# Policies against each other


def run_all(arguments: argparse.Namespace, say: Say) -> list[Run]:
    """All rounds, as far as the time allows; the first is finished in any case."""
    runs = load_runs(arguments)
    wanted = [(round_, concurrency) for round_ in range(arguments.rounds) for concurrency in arguments.concurrency]
    open_ = [place for place in wanted if not is_complete(runs, *place, arguments.policies)]
    if not open_:
        return runs
    start = time.perf_counter()
    llm = LLM(
        arguments.model,
        drafter=arguments.drafter,
        max_num_seqs=max(arguments.concurrency),
        max_model_len=arguments.longest + arguments.max_tokens + 1,
        progress=say,
    )
    with llm:
        engine, params = llm.engine, SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0)
        pool = spread_prompts(llm, arguments.prompts, 1 << 30, arguments.longest)
        limit = engine.drafters.default_limit(arguments.drafter)
        if any(isinstance(policy, int) and policy > limit for policy in arguments.policies):
            say(f"note: the drafter proposes {limit} nodes at most, so that larger fixed lengths are the same as {limit}")
        schedulers = {
            policy: make_scheduler(engine, AUTO if policy == OFF else policy, say, records=policy == AUTO) for policy in arguments.policies
        }
        for policy, own in schedulers.items():
            engine.scheduler = own
            answer(engine, spec_of(arguments, policy), pool[:2], 2, replace(params, max_tokens=16))
        for round_, concurrency in open_:
            if round_ > 0 and time.perf_counter() - start > 60 * arguments.minutes:
                say(f"{arguments.minutes:g} minutes are over: stopped before round {round_ + 1}, {concurrency} at once")
                break
            rng = random.Random(f"{arguments.seed} {round_} {concurrency}")
            prompts = rng.sample(pool, min(max(arguments.requests, TURNS * concurrency), len(pool)))
            busy = busy_cores(0.3) or 0.0
            found = []
            for policy in rng.sample(arguments.policies, len(arguments.policies)):
                engine.scheduler = own = schedulers[policy]
                if isinstance(own, RecordingScheduler):
                    own.steps.clear()
                figures = answer(engine, spec_of(arguments, policy), prompts, concurrency, params)
                del figures["outputs"]
                steps = tuple(own.steps) if isinstance(own, RecordingScheduler) else ()
                found.append(Run(round_, concurrency, str(policy), busy_cores=busy, steps=steps, **figures))
            runs = [run for run in runs if (run.round, run.concurrency) != (round_, concurrency)] + found
            speeds = " | ".join(f"{run.policy} {run.tokens_per_s:.1f}" for run in sorted(found, key=lambda run: -run.tokens_per_s))
            noisy = f" ({busy:.1f} cores busy before)" if busy > BUSY_CORES else ""
            say(f"[{time.perf_counter() - start:.0f} s] round {round_ + 1} of {arguments.rounds}, {concurrency} at once{noisy}: {speeds}")
            save_runs(arguments, runs)
    return runs


def spec_of(arguments: argparse.Namespace, policy: str | int) -> str:
    return OFF if policy == OFF else str(arguments.drafter)


def is_complete(runs: Iterable[Run], round_: int, concurrency: int, policies: Iterable[str | int]) -> bool:
    """Whether all policies have met in this round: one that was cut short is run again as a whole."""
    there = {run.policy for run in runs if (run.round, run.concurrency) == (round_, concurrency)}
    return there >= set(map(str, policies))


def load_runs(arguments: argparse.Namespace) -> list[Run]:
    if arguments.json is None or not arguments.json.exists():
        return []
    own = {name: str(getattr(arguments, name)) for name in CASE}
    try:
        kept = json.loads(arguments.json.read_text("utf-8"))
        differing = [name for name in CASE if kept["case"][name] != own[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{arguments.json} holds no runs of this script ({type(error).__name__}): give another file") from None
    if differing:
        raise SystemExit(f"{arguments.json} holds runs with another {', '.join(differing)}: give another file")
    return [Run(**{**run, "steps": tuple(tuple(step) for step in run["steps"])}) for run in kept["runs"]]


def save_runs(arguments: argparse.Namespace, runs: Sequence[Run]) -> None:
    if arguments.json is None:
        return
    case = {name: str(getattr(arguments, name)) for name in CASE} | {"figures": "observed", "machine": describe_machine()}
    lines = ",\n".join(json.dumps(asdict(run)) for run in runs)
    text = f'{{"case": {json.dumps(case | {"versions": versions()})},\n"runs": [\n{lines}\n]}}\n'
    part = arguments.json.with_name(arguments.json.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(arguments.json)  # a run that is broken off leaves the last whole file


# A hostile drafter


class Turncoat(Drafter):
    """Sleeps whenever it is asked; drafts with `inner`."""

    def __init__(self) -> None:
        self.sleep_s = 0.0
        self.inner: Drafter | None = None
        self.calls = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        assert self.inner is not None
        self.calls += 1
        time.sleep(self.sleep_s)
        return self.inner.propose(rows)


def run_hostile(arguments: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Wall time with a wrong, sleeping drafter over that without, run after run; then tokens until the right one was used."""
    drafter = Turncoat()
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0, ignore_eos=True)
    with LLM(arguments.model, drafter=drafter, max_model_len=arguments.longest + arguments.max_tokens + 1, progress=say) as llm:
        engine, spec = llm.engine, llm.engine.config.drafter
        prompts = spread_prompts(llm, arguments.prompts, arguments.rounds + 1, arguments.longest)
        runs = [answer(engine, OFF, [prompt], 1, params) for prompt in prompts]
        references = {tuple(prompt): run["outputs"][0] for prompt, run in zip(prompts, runs, strict=True)}
        drafter.sleep_s = SLEEP_STEPS * statistics.median(run["wall_s"] / run["tokens"] for run in runs)
        drafter.inner = Anti(references, engine.vocab_size)
        ratios = []
        for prompt in prompts[:-1]:
            drafter.calls = 0
            off, own = (answer(engine, one, [prompt], 1, params) for one in (OFF, spec))
            if off["ids"] != own["ids"]:
                raise SystemExit("the ids with the hostile drafter differ from those without")
            ratios.append(own["wall_s"] / off["wall_s"])
            say(f"wrong and sleeping {1e3 * drafter.sleep_s:.0f} ms, asked {drafter.calls} times: {ratios[-1]:.3f} of the time without it")
        drafter.inner = Oracle(references)
        engine.reset_prefix_cache()
        engine.add(prompts[-1], params, drafter=spec)
        emitted, resumed_at = 0, None
        while engine.has_work:
            for event in engine.step():
                emitted += len(event.token_ids)
                if event.num_accepted and resumed_at is None:
                    resumed_at = emitted
        say(f"right: the first draft is accepted after {resumed_at} tokens")
    return {"sleep_s": drafter.sleep_s, "wall_over_off": ratios, "resumed_at": resumed_at}


def hostile_failures(found: dict[str, Any]) -> list[str]:
    wrong = [
        f"run {place}: {ratio:.3f} times as long as without"
        for place, ratio in enumerate(found["wall_over_off"], 1)
        if ratio > HOSTILE_MOST
    ]
    if found["resumed_at"] is None or found["resumed_at"] > RESUMES_WITHIN:
        wrong.append(f"drafting resumed after {found['resumed_at']} tokens")
    return wrong


# The command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines; the first turns are taken")
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 2, 4, 8, 16))
    parser.add_argument("--policies", type=_policy, nargs="+", default=(AUTO, OFF, 1, 2, 3, 4, 5, 7))
    parser.add_argument("--requests", type=int, default=4, help="per run, but at least three times as many as are under way")
    parser.add_argument("--max-tokens", type=int, help="of an answer; default 48, or 200 with --hostile")
    parser.add_argument("--longest", type=int, default=256, help="prompts of more tokens are left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=15, help="no round is begun after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args(argv)
    arguments.max_tokens = (200 if arguments.hostile else 48) if arguments.max_tokens is None else arguments.max_tokens
    least = {"rounds": arguments.rounds, "requests": arguments.requests, "max-tokens": arguments.max_tokens, "longest": arguments.longest}
    for name, value in {**least, "concurrency": min(arguments.concurrency)}.items():
        if value < 1:
            parser.error(f"--{name} must be 1 or more, got {value}")
    if not arguments.hostile and (AUTO not in arguments.policies or len(set(arguments.policies)) < 2):
        parser.error(f"--policies must name {AUTO} and at least one other, got {' '.join(map(str, arguments.policies))}")
    try:
        load_prompts([arguments.prompts])
    except SpecdecError as error:
        parser.error(str(error))
    if not arguments.hostile:
        load_runs(arguments)  # a file of another case is told now
    return arguments


def _policy(text: str) -> str | int:
    if text in (AUTO, OFF):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be {AUTO}, {OFF} or a number of nodes from 1, got {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if arguments.hostile:
        hostile = run_hostile(arguments, say)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(hostile) + "\n", "utf-8")
        found = hostile_failures(hostile)
    else:
        policies = [str(policy) for policy in arguments.policies]
        runs = [run for run in run_all(arguments, say) if run.policy in policies and run.concurrency in arguments.concurrency]
        text = table(runs, policies) + f"\n{errors_line(runs)}\n"
        print(text)
        if arguments.markdown is not None:
            arguments.markdown.write_text(text, "utf-8")
        if arguments.plot is not None:
            arguments.plot.write_text(chart(runs, policies), "utf-8")
        found = failures(runs, policies)
    say("\n".join(found) or "all holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
