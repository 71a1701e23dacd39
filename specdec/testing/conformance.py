"""A conformance kit: runs a drafter in a real engine on a tiny model and tells what it does wrong.

The engine protects itself, so a broken drafter costs speed and nothing else. That makes it easy to ship one that never
works; this kit is how its author finds out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.drafters.base import Drafter
from specdec.drafters.registry import register_instance, unregister
from specdec.errors import DrafterError
from specdec.request import SamplingParams
from specdec.testing.fixtures import tiny_prompt, write_tiny_checkpoint

_PROMPT_LENGTHS = (1, 2, 3, 15, 16, 17, 33, 64)


_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"page_size": 1, "prefill_chunk": 8}, {"max_num_seqs": 1})  # engine options


@dataclass(frozen=True)
class ConformanceReport:
    """What the drafter brought in the runs of `check_drafter`."""

    drafted: int
    accepted: int
    acceptance_length: float


def check_drafter(
    drafter: str | Drafter | Callable[..., Any],  # a spec, or whatever register_drafter takes
    *,
    model: str | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    predictions: Sequence[Sequence[int]] | None = None,
    max_tokens: int = 32,
    must_accept: bool = False,
) -> ConformanceReport:
    """Runs a drafter and compares with a run without one.

    Greedy and sampled; alone, batched, with chunked prefill and one-token pages; up to the model's length limit; twice
    with the same engine. The ids must be those without a drafter, and the drafter must not have broken its contract.

    Args:
        drafter: a spec string, a Drafter, a Drafter class, a factory or a draft function.
        model: a model folder; a tiny random model (512 ids, length 256, no tokenizer) where none is given.
        prompts: ids; some of 1 to 64 tokens, some repetitive, where none are given.
        predictions: predicted output per prompt.
        max_tokens: per request.
        must_accept: also demand that at least one drafted token was accepted.

    Raises:
        DrafterError: it lists all that was wrong.
        ConfigError: the drafter cannot be built.
    """
    if predictions is not None and prompts is None:
        raise ValueError("predictions belong to prompts: give both")
    given = [list(prompt) for prompt in prompts] if prompts is not None else _default_prompts()
    spec = drafter if isinstance(drafter, str) else register_instance(drafter)
    try:
        if model is not None:
            return _check(spec, model, given, predictions, max_tokens, must_accept)
        with tempfile.TemporaryDirectory() as folder:
            return _check(spec, str(write_tiny_checkpoint(folder)), given, predictions, max_tokens, must_accept)
    finally:
        if not isinstance(drafter, str):
            unregister(spec)


def _default_prompts() -> list[list[int]]:
    return [tiny_prompt(length) for length in _PROMPT_LENGTHS] + [tiny_prompt(5) * 6, [7] * 20, tiny_prompt(250)]


def _check(
    spec: str, model: str, prompts: list[list[int]], predictions: Sequence[Sequence[int]] | None, max_tokens: int, must_accept: bool
) -> ConformanceReport:
    from specdec.llm import LLM

    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
        for seed, temperature in enumerate([0.0, 0.8] * len(prompts))
    ][: len(prompts)]
    params += [SamplingParams(temperature=1.0 - p.temperature, seed=p.seed, max_tokens=max_tokens) for p in params]
    texts = prompts * 2
    hints = None if predictions is None else [list(prediction) for prediction in predictions] * 2
    expected = [output.token_ids for output in LLM(model, dtype="float32").generate(texts, params)]
    problems: list[str] = []
    drafted = accepted = verifies = emitted = 0
    for options in _VARIANTS:
        llm = LLM(model, drafter=spec, dtype="float32", check_invariants=True, draft_budget="all", **options)
        for run in ("first", "second"):
            outputs = llm.generate(texts, params, predictions=hints)
            different = [index for index, output in enumerate(outputs) if output.token_ids != expected[index]]
            if different:
                problems.append(f"{run} run with {options}: other ids than without a drafter in requests {different}")
            drafted += sum(output.stats.drafted for output in outputs)
            accepted += sum(output.stats.accepted for output in outputs)
            verifies += sum(output.stats.verifies for output in outputs)
            emitted += sum(output.stats.emitted for output in outputs)
        for status in llm.engine.drafters.status():
            if status["errors"]:
                problems.append(f"with {options}: {status['name']} broke its contract {status['errors']}, last: {status['last_error']}")
    if must_accept and not accepted:
        problems.append(f"none of {drafted} drafted tokens was accepted")
    if problems:
        raise DrafterError(f"drafter {spec} does not conform:\n" + "\n".join(f"- {problem}" for problem in problems))
    return ConformanceReport(drafted, accepted, emitted / verifies if verifies else 1.0)
