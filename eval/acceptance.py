"""Acceptance, time and identity of drafters on real prompts. `off` runs first; what it answers is what the others must."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specdec.config import EngineConfig
from specdec.drafter_spec import parse_drafter_spec
from specdec.errors import ContextLengthError, SpecdecError
from specdec.eval.datasets import PromptRow
from specdec.request import MAX_SEED, RequestStats, SamplingParams

if TYPE_CHECKING:
    from specdec.engine import Engine

OFF = "off"
_WARM_UP_TOKENS = 8

Progress = Callable[[str, int, int], None]
"""Called as (drafter, requests done, requests in all)."""


@dataclass(frozen=True)
class Case:
    """One request, the same for every drafter.

    Attributes:
        row: index of its row.
        turn: index of its turn; its prompt holds what `off` answered to the turns before.
        seed: of its sampling noise.
    """

    row: int
    turn: int
    id: str
    category: str
    prompt_ids: tuple[int, ...]
    prediction_ids: tuple[int, ...]
    seed: int


@dataclass
class Answer:
    """What one request gave."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass(frozen=True)
class Divergence:
    """Where an answer first differs from that of `off`: the ids at that position, None past the end."""

    id: str
    turn: int
    position: int
    expected: int | None
    got: int | None


@dataclass(frozen=True)
class Run:
    """One drafter over all cases.

    Attributes:
        answers: one per case.
        wall_s: from the first request to the last token, without loading and warm-up.
    """

    drafter: str
    cases: tuple[Case, ...]
    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    def differences(self, reference: Run) -> list[Divergence]:
        """One entry per answer whose ids are not the reference's."""
        found = []
        for case, answer, wanted in zip(self.cases, self.answers, reference.answers, strict=True):
            if answer.token_ids != wanted.token_ids:
                pairs = zip(answer.token_ids, wanted.token_ids, strict=False)
                position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(answer.token_ids), len(wanted.token_ids)))
                found.append(Divergence(case.id, case.turn, position, _at(wanted.token_ids, position), _at(answer.token_ids, position)))
        return found


@dataclass(frozen=True)
class Settings:
    """How to run.

    Attributes:
        max_tokens: per turn.
        temperature: of every request.
        seed: of row 0; row i has seed + i.
        batch: requests in flight at once.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    batch: int = 1

    def params(self, case: Case) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=case.seed)


@dataclass(frozen=True)
class Evaluation:
    """All runs, `off` first, and the ids of the rows whose prompts did not fit."""

    runs: tuple[Run, ...]
    skipped: tuple[str, ...]
    model_name: str


def run_acceptance(
    config: EngineConfig,
    drafters: Sequence[str],
    rows: Sequence[PromptRow],
    settings: Settings,
    *,
    say: Callable[[str], None] = lambda _line: None,
    progress: Progress = lambda _drafter, _done, _total: None,
) -> Evaluation:
    """Runs `off`, then every drafter, on the same prompts with the same seeds.

    A drafter that loads weights needs an engine that was started with it; all others share the first engine.

    Args:
        config: the engine's options; its `drafter` is not used. With `draft_budget` all, what a drafter proposes is verified
            whether it pays or not.
        drafters: drafter specs.
        say: told about loading and skipped rows.
        progress: told after every request.
    """
    from specdec.engine import Engine

    heavy = [spec for spec in drafters if loads_weights(spec)]
    first = heavy[0] if heavy else OFF
    engine = Engine.from_config(replace(config, drafter=first), progress=say)
    try:
        model_name = engine.model_name
        reference, skipped = _run_off(engine, rows, settings, say, progress)
        runs = {OFF: reference}
        for spec in drafters:
            if spec not in heavy or spec == first:
                runs.setdefault(spec, _run(engine, spec, reference.cases, settings, progress))
    finally:
        engine.close()
    for spec in heavy[1:]:
        engine = Engine.from_config(replace(config, drafter=spec), progress=say)
        try:
            runs.setdefault(spec, _run(engine, spec, reference.cases, settings, progress))
        finally:
            engine.close()
    order = [OFF, *(spec for spec in dict.fromkeys(drafters) if spec != OFF)]
    return Evaluation(tuple(runs[spec] for spec in order), tuple(skipped), model_name)


def loads_weights(spec: str) -> bool:
    """Whether a drafter spec needs an engine that was started with it."""
    return any(part.target is not None for part in parse_drafter_spec(spec))


def _run_off(
    engine: Engine, rows: Sequence[PromptRow], settings: Settings, say: Callable[[str], None], progress: Progress
) -> tuple[Run, list[str]]:
    """Runs turn by turn, since a later turn's prompt holds the earlier answers. Rows that do not fit are left out."""
    cases: list[Case] = []
    answers: list[Answer] = []
    skipped: list[str] = []
    wall = 0.0
    history: dict[int, list[str]] = {}
    total = sum(len(row.turns) for row in rows)
    room = engine.max_model_len - 1
    for turn in range(max(len(row.turns) for row in rows)):
        wave = []
        for index, row in enumerate(rows):
            if turn < len(row.turns) and len(history.get(index, [])) == turn:
                ids = prompt_ids(engine, row, turn, history.get(index, []))
                if len(ids) > room:
                    skipped.append(row.id)
                    say(f"skipped {row.id} turn {turn + 1}: {len(ids)} prompt tokens, the model takes {room}")
                    continue
                predicted = tuple(_encode(engine, row.prediction, special=False)) if row.prediction else ()
                wave.append(Case(index, turn, row.id, row.category, tuple(ids), predicted, (settings.seed + index) % MAX_SEED))
        if not cases:
            _warm_up(engine, OFF, wave, settings)
        done = len(cases)
        got, seconds = _run_cases(engine, OFF, wave, settings, lambda n, base=done: progress(OFF, base + n, total))  # type: ignore[misc]
        for case, answer in zip(wave, got, strict=True):
            history.setdefault(case.row, []).append(answer.text)
        cases += wave
        answers += got
        wall += seconds
    if not cases:
        raise ContextLengthError(f"none of the {len(rows)} prompts fits the model's {engine.max_model_len} tokens")
    return Run(OFF, tuple(cases), tuple(answers), wall), skipped


def _run(engine: Engine, spec: str, cases: Sequence[Case], settings: Settings, progress: Progress) -> Run:
    engine.reset_prefix_cache()  # what earlier runs left there must not help this one
    _warm_up(engine, spec, cases, settings)
    answers: list[Answer] = []
    wall = 0.0
    for turn in range(max(case.turn for case in cases) + 1):  # in the same waves as `off`, so that the prefix cache helps both alike
        wave = [case for case in cases if case.turn == turn]
        done = len(answers)
        got, seconds = _run_cases(engine, spec, wave, settings, lambda n, base=done: progress(spec, base + n, len(cases)))  # type: ignore[misc]
        answers += got
        wall += seconds
    return Run(spec, tuple(cases), tuple(answers), wall)


def _warm_up(engine: Engine, spec: str, cases: Sequence[Case], settings: Settings) -> None:
    """Builds what is built on first use, and leaves no prefix behind."""
    if cases:
        _run_cases(engine, spec, cases[:1], replace(settings, max_tokens=_WARM_UP_TOKENS), lambda _done: None)
        engine.reset_prefix_cache()


def _run_cases(
    engine: Engine, spec: str, cases: Sequence[Case], settings: Settings, done: Callable[[int], None]
) -> tuple[list[Answer], float]:
    """Keeps `settings.batch` requests in flight. Returns one answer per case and the wall seconds."""
    answers = [Answer() for _ in cases]
    running: dict[str, int] = {}
    waiting = list(enumerate(cases))[::-1]
    finished = 0
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < settings.batch:
            index, case = waiting.pop()
            (request_id,) = engine.add(case.prompt_ids, settings.params(case), drafter=spec, prediction=case.prediction_ids)
            running[request_id] = index
        for event in engine.step():
            answer = answers[running[event.request_id]]
            answer.token_ids += event.token_ids
            answer.text += event.text
            answer.stats = event.stats
            if event.error is not None:
                raise SpecdecError(f"{spec}: {cases[running[event.request_id]].id} failed: {event.error}")
            if event.finish_reason is not None:
                del running[event.request_id]
                finished += 1
                done(finished)
    return answers, time.perf_counter() - start


def prompt_ids(engine: Engine, row: PromptRow, turn: int = 0, history: Sequence[str] = ()) -> list[int]:
    """Token ids of a turn, after `history`, the answers to the turns before; by the chat template unless the row is raw."""
    from specdec.chat import encode_chat, has_chat_template

    turns = row.turns[: turn + 1]
    if row.raw or not has_chat_template(engine.tokenizer):
        text = "".join(turn_text + answer for turn_text, answer in zip(turns, [*history, ""], strict=True))
        return _encode(engine, text, special=True)
    messages: list[Mapping[str, Any]] = []
    for user, answer in zip(turns, [*history, None], strict=True):
        messages.append({"role": "user", "content": user})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return encode_chat(engine.tokenizer, messages)


def _encode(engine: Engine, text: str, *, special: bool) -> list[int]:
    if engine.tokenizer is None:
        raise SpecdecError(f"the model {engine.model_name} comes without a tokenizer, so prompts cannot be read")
    return list(engine.tokenizer.encode(text, add_special_tokens=special))


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None
