"""Decoding speed with and without drafters in turn, and the milliseconds of a step outside the target's forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec.errors import SpecdecError
from specdec.eval.acceptance import OFF
from specdec.eval.samples import Samples
from specdec.request import RequestStats, SamplingParams

if TYPE_CHECKING:
    from specdec.engine import Engine
    from specdec.eval.bench import BenchSettings

Prompt = Sequence[int]
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class HostCost:
    """Seconds of one step, the target's forward left out.

    Attributes:
        total_s: wall time of `Engine.step` less packing, upload and forward.
        draft_s, sample_s, commit_s: as in `StepCost`; the rest of the total is scheduling, output and bookkeeping.
    """

    total_s: float
    draft_s: float
    sample_s: float
    commit_s: float

    @property
    def other_s(self) -> float:
        return self.total_s - self.draft_s - self.sample_s - self.commit_s


@dataclass
class DecodeRun:
    """One drafter over all prompts. Steps in which a prompt was still being read count nowhere.

    Attributes:
        token_ids: per prompt.
        tokens: emitted by steps that only decode.
        seconds: that those took.
        host: per step in which every place of the batch was taken.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    host: list[HostCost] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Paired:
    """A drafter's runs at one batch size, each with the run of `off` just before it."""

    drafter: str
    off: list[DecodeRun] = field(default_factory=list)
    runs: list[DecodeRun] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return all(run.token_ids == off.token_ids for run, off in zip(self.runs, self.off, strict=True))

    @property
    def speedup(self) -> Samples:
        return rates(self.runs).ratios(rates(self.off))


def rates(runs: Sequence[DecodeRun]) -> Samples:
    """Tokens per second, one measurement per run."""
    return Samples.of(run.tokens_per_s for run in runs)


def measure_decode(
    engine: Engine, settings: BenchSettings, prompts: Sequence[Prompt], batch: int, done: Callable[[], None]
) -> list[Paired]:
    """Runs off, a drafter, off, the next drafter, ... in every repeat. Without drafters, `off` is paired with itself.

    Args:
        settings: the drafters, all of which this engine has, repeats and max_tokens count here.
        prompts: ids; `batch` of them run at a time.
        done: called after every pair.
    """
    for spec in (OFF, *settings.drafters):
        decode(engine, spec, prompts[:batch], batch, _WARM_UP_TOKENS)
    found = [Paired(spec) for spec in settings.drafters or (OFF,)]
    for _ in range(settings.repeats):
        for pair in found:
            pair.off.append(decode(engine, OFF, prompts, batch, settings.max_tokens))
            own = decode(engine, pair.drafter, prompts, batch, settings.max_tokens) if pair.drafter != OFF else pair.off[-1]
            pair.runs.append(own)
            done()
    return found


def decode(engine: Engine, spec: str, prompts: Sequence[Prompt], batch: int, max_tokens: int) -> DecodeRun:
    """Greedy answers to all prompts, `batch` of them at a time, from an empty prefix cache."""
    engine.reset_prefix_cache()
    run = DecodeRun()
    for start in range(0, len(prompts), batch):
        _decode_together(engine, spec, prompts[start : start + batch], max_tokens, run)
    return run


def _decode_together(engine: Engine, spec: str, prompts: Sequence[Prompt], max_tokens: int, run: DecodeRun) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    answers: dict[str, list[int]] = {engine.add(prompt, params, drafter=spec)[0]: [] for prompt in prompts}
    stats: dict[str, RequestStats] = {}
    running = set(answers)
    clock = engine.target.backend.clock
    spent = [0.0] * 4
    while engine.has_work:
        only_decodes, full = len(stats) == len(answers), len(running) == len(answers)
        start = clock()
        events = engine.step()
        wall = clock() - start
        for event in events:
            if event.error is not None:
                raise SpecdecError(f"{spec}: a request failed: {event.error}")
            answers[event.request_id] += event.token_ids
            stats[event.request_id] = event.stats
            if event.finish_reason is not None:
                running.discard(event.request_id)
        before, spent = spent, _spent(stats.values())
        if only_decodes:
            run.tokens += sum(len(event.token_ids) for event in events)
            run.seconds += wall
            if full:
                forward_s, draft_s, sample_s, commit_s = (now - then for now, then in zip(spent, before, strict=True))
                run.host.append(HostCost(wall - forward_s, draft_s, sample_s, commit_s))
    run.token_ids += answers.values()


def _spent(stats: Collection[RequestStats]) -> list[float]:
    """Seconds so far, all requests together: forward, draft, sample, commit."""
    return [
        sum(one.verify_s + one.prefill_s for one in stats),
        sum(one.draft_s for one in stats),
        sum(one.sample_s for one in stats),
        sum(one.commit_s for one in stats),
    ]
