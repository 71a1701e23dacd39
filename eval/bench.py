"""`specdec bench`: how fast a model runs here. Says what to measure with which engine; the `bench_*` modules measure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specdec.config import EngineConfig
from specdec.errors import ConfigError, ContextLengthError
from specdec.eval.acceptance import OFF, loads_weights, prompt_ids
from specdec.eval.bench_prompts import SHIPPED
from specdec.eval.datasets import PromptRow
from specdec.eval.machine import BUSY_CORES, busy_cores

if TYPE_CHECKING:
    from specdec.engine import Engine
    from specdec.eval.bench_decode import DecodeRun, Paired
    from specdec.eval.bench_forward import StepTimes
    from specdec.eval.samples import Samples

PARTS = ("prefill", "steps", "decode")
PREFILL_TOKENS = (128, 512, 2048)
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (1, 4, 16)
HOST_BATCHES = (1, 16)
HOST_DRAFTER = "ngram"
_ROUNDS_PER_REPEAT = 5  # a forward is far shorter than the other measurements
_FEWEST_PROMPTS = 4  # however small the batch
_LEAST_CONTEXT = 16

Say = Callable[[str], None]  # takes a line


@dataclass(frozen=True)
class BenchSettings:
    """What to measure.

    Attributes:
        parts: of PARTS.
        drafters: specs to decode with, besides `off`.
        repeats: of everything; alternatives take turns in each.
        max_tokens: of one decoded prompt.
    """

    parts: tuple[str, ...] = PARTS
    drafters: tuple[str, ...] = (HOST_DRAFTER,)
    repeats: int = 3
    max_tokens: int = 64


@dataclass
class Measurements:
    """What was measured. Parts that were not asked for stay empty.

    Attributes:
        prefill: prompt tokens -> tokens per second.
        decode: batch -> one entry per drafter, of all engines.
        host: batch -> runs of HOST_DRAFTER.
        weights: bytes that a forward of one row reads, by dtype.
        busy_cores: that other programs used before the first measurement; None where the system does not tell.
        notes: what was left out, and why; and whether the machine was busy.
    """

    model_name: str = ""
    busy_cores: float | None = None
    weights: dict[str, int] = field(default_factory=dict)
    prefill: dict[int, Samples] = field(default_factory=dict)
    steps: StepTimes | None = None
    decode: dict[int, list[Paired]] = field(default_factory=dict)
    host: dict[int, list[DecodeRun]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run_bench(
    config: EngineConfig,
    settings: BenchSettings,
    rows: Sequence[PromptRow] = SHIPPED,
    *,
    say: Say = lambda _line: None,
    show: Say = lambda _line: None,
) -> Measurements:
    """Loads the model and measures it. Every drafter that loads weights gets an engine that was started with it.

    Args:
        config: the engine's options; its `drafter` is not used.
        rows: prompts to decode; the first turn of each.
        say: told about loading and what is left out.
        show: told what is being measured just now; its next line replaces the last.
    """
    from specdec.engine import Engine

    bench = _Bench(settings, Measurements(busy_cores=busy_cores()), say, show)
    if bench.found.busy_cores is not None and bench.found.busy_cores > BUSY_CORES:
        bench.note(f"other programs kept {bench.found.busy_cores:.1f} cores busy when this began")
    heavy = [spec for spec in settings.drafters if loads_weights(spec)]
    light = [spec for spec in settings.drafters if spec not in heavy]
    shares = [(*light, *heavy[:1]), *((spec,) for spec in heavy[1:])] if "decode" in settings.parts else [()]
    for number, drafters in enumerate(shares):
        started_with = next((spec for spec in drafters if spec in heavy), OFF)
        engine = Engine.from_config(replace(config, drafter=started_with), progress=say)
        try:
            if number == 0:
                bench.measure_model(engine)
            if "decode" in settings.parts:
                bench.measure_drafters(engine, drafters, rows)
        finally:
            engine.close()
    return bench.found


@dataclass
class _Bench:
    """The measurements under way, and who is told."""

    settings: BenchSettings
    found: Measurements
    say: Say
    show: Say

    def measure_model(self, engine: Engine) -> None:
        """Prefill and steps: no drafter takes part."""
        from specdec.eval.bench_forward import measure_prefill, measure_steps, weights_read

        self.found.model_name = engine.model_name
        self.found.weights = weights_read(engine.target.model)
        repeats, room = self.settings.repeats, engine.max_model_len
        if "prefill" in self.settings.parts:
            lengths = self._fitting("prefill of {} tokens", PREFILL_TOKENS, room - 1)
            if lengths:
                self.found.prefill = measure_prefill(engine, lengths, repeats, lambda n, of: self.show(f"prefill: {n} of {of} repeats"))
        if "steps" in self.settings.parts:
            sizes = self._fitting("steps of {} rows", STEP_ROWS, room - _LEAST_CONTEXT)
            if sizes:
                rounds = _ROUNDS_PER_REPEAT * repeats
                self.found.steps = measure_steps(engine, sizes, rounds, lambda n, of: self.show(f"steps: {n} of {of} rounds"))

    def measure_drafters(self, engine: Engine, drafters: tuple[str, ...], rows: Sequence[PromptRow]) -> None:
        """Decodes with `off` and with each drafter that this engine has."""
        from specdec.eval.bench_decode import decode, measure_decode

        settings = replace(self.settings, drafters=drafters)
        prompts = self._prompts(engine, rows)
        total = settings.repeats * max(1, len(drafters))
        for batch in self._fitting("decoding {} at once", BATCHES, engine.config.max_num_seqs):
            chosen = [prompts[index % len(prompts)] for index in range(max(batch, _FEWEST_PROMPTS))]
            count = itertools.count(1)
            pairs = measure_decode(
                engine,
                settings,
                chosen,
                batch,
                lambda batch=batch, count=count: self.show(f"decoding {batch} at once: {next(count)} of {total} runs"),  # type: ignore[misc]
            )
            self.found.decode.setdefault(batch, []).extend(pairs)
            if batch in HOST_BATCHES and batch not in self.found.host:
                own = next((pair.runs for pair in pairs if pair.drafter == HOST_DRAFTER), None)
                self.found.host[batch] = own or [decode(engine, HOST_DRAFTER, chosen, batch, settings.max_tokens)]

    def note(self, text: str) -> None:
        """Tells what belongs beside the figures, once."""
        if text not in self.found.notes:
            self.found.notes.append(text)
            self.say(text)

    def _prompts(self, engine: Engine, rows: Sequence[PromptRow]) -> list[list[int]]:
        """Ids of all prompts that fit. A model without tokenizer gets ids that repeat themselves."""
        if engine.tokenizer is None:
            self.note("the model has no tokenizer: its prompts are ids that repeat themselves")
            return [[(start + step % 8) % engine.vocab_size for step in range(32)] for start in range(max(BATCHES))]
        room = engine.max_model_len - self.settings.max_tokens
        fitting = []
        for row in rows:
            ids = prompt_ids(engine, row)
            if len(ids) <= room:
                fitting.append(ids)
            else:
                self.note(f"skipped prompt {row.id}: {len(ids)} tokens, and there is room for {room}")
        if not fitting:
            raise ContextLengthError(f"none of the {len(rows)} prompts fits: the longest that does has {room} tokens")
        return fitting

    def _fitting(self, what: str, sizes: Sequence[int], room: int) -> list[int]:
        """The sizes up to `room`; the others are noted."""
        for size in sizes:
            if size > room:
                self.note(f"skipped {what.format(size)}: there is room for {max(room, 0)}")
        return [size for size in sizes if size <= room]


def check_settings(settings: BenchSettings) -> None:
    """Raises ConfigError for what cannot be measured, before anything is loaded."""
    from specdec.drafters.registry import check_spec

    for spec in settings.drafters:
        check_spec(spec)
    if settings.max_tokens < 2:
        raise ConfigError(f"max_tokens must be at least 2, since the first token comes with the prompt: got {settings.max_tokens}")
