"""LLM: the Python way in. Prompts in, texts out, with the engine behind it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.choices import best_choices
from specdec.config import DEMO_MODEL, EngineConfig
from specdec.engine import Engine
from specdec.errors import ConfigError, RequestError
from specdec.mailbox import Mailbox
from specdec.plan import Event, TokenLogprobs
from specdec.request import DEFAULT_SCHEDULING, RequestStats, SamplingParams, Scheduling

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Choice:
    """One completion.

    Attributes:
        token_ids: emitted ids, an end token included.
        text: their text, without end tokens and cut before a stop string.
        finish_reason: `stop`, `length`, `abort` or `error`.
        stats: what it cost, and what the drafts brought.
        error: what went wrong, with finish_reason `error`.
        logprobs: one entry per token id where `SamplingParams.logprobs` or `best_of` asked for them, else None.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stats: RequestStats
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of all emitted tokens together; None where logprobs were not asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True)
class GenerationOutput:
    """All choices of one prompt; the properties are those of the first.

    Attributes:
        choices: in the order of their seeds; with `best_of`, the best ones, best first.
        prompt_logprobs: one entry per prompt token, None for the first, where asked for.
    """

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def stats(self) -> RequestStats:
        return self.choices[0].stats


class LLM:
    """A loaded model that generates.

    Args:
        model: a hub id, a folder with safetensors, a `.gguf` file, or `demo`.
        drafter: a drafter spec; or a Drafter, a factory or a function `(tokens, limit) -> list[int]`.
        progress: told what is being loaded, a line at a time.
        options: any other field of EngineConfig.

    Raises:
        ConfigError: an option is unknown or impossible.
        ModelError: the model cannot be loaded.
        DrafterError: the drafter cannot be built.
    """

    def __init__(
        self,
        model: str = DEMO_MODEL,
        *,
        drafter: Any = "off",  # a spec, or whatever register_drafter takes
        progress: Callable[[str], None] | None = None,
        **options: Any,  # fields of EngineConfig, checked there
    ) -> None:
        if not isinstance(drafter, str):
            from specdec.drafters.registry import register_instance, unregister

            drafter = register_instance(drafter)
            weakref.finalize(self, unregister, drafter)  # nobody else knows the name
        config = EngineConfig.from_dict({"model": model, "drafter": drafter, **options})
        self.engine = Engine.from_config(config, progress=progress)
        self._mailbox = Mailbox(self.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: str | None = None,
        predictions: Sequence[Prompt | None] | None = None,
        scheduling: Scheduling = DEFAULT_SCHEDULING,
        progress: Callable[[int], None] | None = None,
    ) -> list[GenerationOutput]:
        """Generates for all prompts together.

        Args:
            prompts: texts or lists of token ids; a single one is a list of one.
            params: one for all, or one per prompt; None is `SamplingParams()`.
            drafter: drafter spec for these prompts; None is the configured one.
            predictions: predicted output per prompt, for the `prediction` drafter.
            scheduling: priority, latency targets and the like, for these prompts.
            progress: called after every step with the number of tokens it emitted.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing of this call is generated then.
        """
        ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        all_params = _per_prompt(params, len(ids))
        guesses = list(predictions) if predictions is not None else [None] * len(ids)
        if len(guesses) != len(ids):
            raise RequestError(f"predictions must be as many as prompts: got {len(guesses)} for {len(ids)}", param="predictions")
        added: list[list[str]] = []
        try:
            for prompt, one, guess in zip(ids, all_params, guesses, strict=True):
                added.append(self._add(prompt, one, drafter, guess, scheduling))
            results = self._run([choice for request in added for choice in request], progress)
        finally:  # Ctrl-C included: nothing of this call may stay behind in the engine
            self._mailbox.close(choice for request in added for choice in request)
        return [
            _output(prompt, one, [results[choice] for choice in request])
            for prompt, one, request in zip(ids, all_params, added, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        prediction: Prompt | None = None,
        scheduling: Scheduling = DEFAULT_SCHEDULING,
    ) -> Generator[Event, None, None]:
        """Events of one request as they happen; closing the iterator aborts it. `params.n` and `best_of` must be 1."""
        params = params or SamplingParams()
        if params.num_choices != 1:
            raise RequestError(
                f"a stream has one choice, got n={params.n} and best_of={params.best_of}: use generate",
                param="n" if params.n != 1 else "best_of",
            )
        added = self._add(self._encode(prompt), params, drafter, prediction, scheduling)
        try:
            last = None
            while last is None:
                for event in self._mailbox.next(added):
                    yield event
                    last = event.finish_reason
        finally:
            self._mailbox.close(added)

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the answer.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        from specdec.chat import encode_chat

        return encode_chat(self.engine.tokenizer, messages)

    def close(self) -> None:
        """Ends what runs."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(
        self, prompt: list[int], params: SamplingParams, drafter: str | None, guess: Prompt | None, scheduling: Scheduling
    ) -> list[str]:
        prediction = self._encode(guess, special=False) if guess is not None else ()
        return self._mailbox.add(lambda: self.engine.add(prompt, params, drafter=drafter, prediction=prediction, scheduling=scheduling))

    def _encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return _as_ids(prompt)
        if self.engine.tokenizer is None:
            raise RequestError("this model has no tokenizer: give token ids", param="prompt")
        ids: list[int] = self.engine.tokenizer.encode(prompt, add_special_tokens=special)
        return ids

    def _run(self, ids: Sequence[str], progress: Callable[[int], None] | None) -> dict[str, _Result]:
        results = {request_id: _Result() for request_id in ids}
        running = set(ids)
        while running:
            events = self._mailbox.next(ids)
            for event in events:
                results[event.request_id].take(event)
                if event.finish_reason is not None:
                    running.remove(event.request_id)
            if progress is not None:
                progress(sum(len(event.token_ids) for event in events))
        return results


@dataclass
class _Result:
    """One choice as it comes in."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Event | None = None

    def take(self, event: Event) -> None:
        self.token_ids += event.token_ids
        self.pieces += event.pieces
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.last = event

    def choice(self, params: SamplingParams) -> Choice:
        """The choice, once its last event is in."""
        last = self.last
        assert last is not None and last.finish_reason is not None
        scored = params.logprobs is not None or params.num_choices > params.n
        logprobs = tuple(self.logprobs) if scored else None
        return Choice(tuple(self.token_ids), "".join(self.pieces), last.finish_reason, last.stats, last.error, logprobs)


def _output(prompt: Sequence[int], params: SamplingParams, results: Sequence[_Result]) -> GenerationOutput:
    kept: Sequence[int] = range(params.n)
    if params.num_choices > params.n:
        kept = best_choices([result.logprobs for result in results], params.n)
    scored = (None, *results[0].prompt_logprobs) if params.prompt_logprobs is not None else None
    return GenerationOutput(tuple(prompt), tuple(results[index].choice(params) for index in kept), scored)


def _as_list(prompts: Any) -> list[Prompt]:  # Prompt | Sequence[Prompt]; users hand in arrays and worse
    if isinstance(prompts, str):
        return [prompts]
    try:
        items = list(prompts)
    except TypeError:
        raise RequestError(f"a prompt must be a text or a sequence of token ids, got {type(prompts).__name__}", param="prompt") from None
    return [items] if items and isinstance(items[0], (int, np.integer)) else items


def _as_ids(prompt: Any) -> list[int]:  # a sequence of integers, of whatever kind
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(f"a prompt must be a text or a sequence of token ids, got {_short(prompt)}", param="prompt") from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ConfigError(f"params must be one, or as many as prompts: got {len(params)} for {count}")
    return list(params)
