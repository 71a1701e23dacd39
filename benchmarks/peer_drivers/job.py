"""What all drivers of `benchmarks/peers.py` share: a job comes as JSON on stdin, the result goes to stdout as its last line.

Standard library only, since drivers run in environments of other projects. A driver is a class with some of the methods
of `Driver`; a case whose method it lacks is not measured.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Job = dict[str, Any]
"""JSON values: case, model, draft, mode, threads, prompts (pairs of id and text), max_tokens, rows, context, tokens, levels, work."""


@dataclass(frozen=True)
class Answer:
    """One greedy answer.

    Attributes:
        tokens: emitted.
        first_s: from the request to the first token.
        rest_s: from the first token to the last.
    """

    text: str
    tokens: int
    first_s: float
    rest_s: float


class Driver(Protocol):
    """A loaded model. All but `version` may be missing."""

    version: str

    def chat(self, text: str, max_tokens: int) -> Answer:
        """Answers a user's message, alone."""

    def step_s(self, rows: list[int], context: int) -> dict[int, float]:
        """Seconds of a forward of so many rows behind `context` tokens, the logits of all rows included."""

    def prefill_s(self, tokens: int) -> float:
        """Seconds that reading a prompt takes, up to the logits of its last token."""

    def chat_together(self, texts: list[str], max_tokens: int) -> tuple[int, float]:
        """Answers all messages at once. Returns tokens emitted and wall seconds, prompts included."""


class Unsupported(Exception):
    """The program cannot do what the job asks for."""


def run_job(load: Callable[[Job], Driver]) -> None:
    """Reads the job, loads, measures, tells. `load` may raise Unsupported."""
    job = json.load(sys.stdin)
    try:
        driver = load(job)
        try:
            method, measure = _CASES[job["case"]]
            if not hasattr(driver, method):
                raise Unsupported(f"its driver does not measure the case {job['case']}")
            result = {"version": driver.version, **measure(driver, job)}
        finally:
            getattr(driver, "close", lambda: None)()
    except (Unsupported, ImportError) as error:
        result = {"error": str(error)}
    print(f"\n{json.dumps(result)}", flush=True)


def _chat(driver: Driver, job: Job) -> Job:
    """Tokens per second after the first token, per prompt."""
    driver.chat(job["prompts"][0][1], 4)
    answers = {name: driver.chat(text, job["max_tokens"]) for name, text in job["prompts"]}
    return {
        "values": {name: (answer.tokens - 1) / answer.rest_s for name, answer in answers.items() if answer.tokens > 1},
        "first_s": {name: answer.first_s for name, answer in answers.items()},
        "texts": {name: answer.text for name, answer in answers.items()},
    }


def _steps(driver: Driver, job: Job) -> Job:
    return {"values": {f"{rows} rows": seconds for rows, seconds in driver.step_s(job["rows"], job["context"]).items()}}


def _prefill(driver: Driver, job: Job) -> Job:
    tokens = job["tokens"]
    driver.prefill_s(tokens)
    return {"values": {f"{tokens} tokens": tokens / statistics.median(driver.prefill_s(tokens) for _ in range(3))}}


def _concurrency(driver: Driver, job: Job) -> Job:
    texts = [text for _, text in job["prompts"]]
    driver.chat_together(texts[:1], 4)
    values = {}
    for level in job["levels"]:
        tokens, seconds = driver.chat_together([texts[index % len(texts)] for index in range(level)], job["max_tokens"])
        values[f"{level} at once"] = tokens / seconds
    return {"values": values}


_CASES: dict[str, tuple[str, Callable[[Driver, Job], Job]]] = {
    "decode": ("chat", _chat),
    "mix": ("chat", _chat),
    "steps": ("step_s", _steps),
    "prefill": ("prefill_s", _prefill),
    "concurrency": ("chat_together", _concurrency),
}
"""Case -> the method that a driver needs for it, and what measures it."""
