"""specdec itself as a contender, in a process of its own like all others. The mode is a drafter spec."""

from __future__ import annotations

import time

from job import Answer, Job, run_job

from specdec import __version__
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.eval.acceptance import prompt_ids
from specdec.eval.bench_forward import measure_prefill, measure_steps
from specdec.eval.datasets import PromptRow
from specdec.request import SamplingParams

_ROUNDS = 5


class Specdec:
    def __init__(self, job: Job) -> None:
        self.version = f"specdec {__version__}"
        self.engine = Engine.from_config(EngineConfig(model=job["model"], drafter=job["mode"], dtype=job["dtype"]))

    def chat(self, text: str, max_tokens: int) -> Answer:
        start = time.perf_counter()
        self._add(text, max_tokens)
        first, pieces, count = 0.0, [], 0
        while self.engine.has_work:
            for event in self.engine.step():
                pieces.append(event.text)
                count += len(event.token_ids)
                first = first or time.perf_counter()
        return Answer("".join(pieces), count, first - start, time.perf_counter() - first)

    def step_s(self, rows: list[int], context: int) -> dict[int, float]:
        times = measure_steps(self.engine, rows, _ROUNDS, lambda _done, _total: None)
        if times.context != context:
            raise ValueError(f"steps must be timed behind {context} tokens, got {times.context}")
        return {size: samples.median for size, samples in times.seconds.items()}

    def prefill_s(self, tokens: int) -> float:
        return tokens / measure_prefill(self.engine, [tokens], 1, lambda _done, _total: None)[tokens].median

    def chat_together(self, texts: list[str], max_tokens: int) -> tuple[int, float]:
        start, count = time.perf_counter(), 0
        for text in texts:
            self._add(text, max_tokens)
        while self.engine.has_work:
            count += sum(len(event.token_ids) for event in self.engine.step())
        return count, time.perf_counter() - start

    def close(self) -> None:
        self.engine.close()

    def _add(self, text: str, max_tokens: int) -> None:
        """From an empty prefix cache, unless others run: no prompt is to profit from the round before."""
        if not self.engine.has_work:
            self.engine.reset_prefix_cache()
        ids = prompt_ids(self.engine, PromptRow("", "", (text,)))
        self.engine.add(ids, SamplingParams(max_tokens=max_tokens, temperature=0.0))


if __name__ == "__main__":
    run_job(Specdec)
