"""/v1/completions: prompts as texts or ids, `echo`, events to OpenAI objects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any  # JSON objects are open

from specdec.choices import best_choices
from specdec.errors import ContextLengthError
from specdec.server.engine_loop import EngineLike, Submission, Ticket
from specdec.server.errors import bad_request
from specdec.server.generation import Header, Output, choose_drafter, encode, gather, read, usage
from specdec.server.logprobs import CompletionLogprobs, TokenTexts, empty_completion_logprobs
from specdec.server.protocol import COMPLETION_MAX_TOKENS, CompletionRequest


@dataclass(frozen=True)
class CompletionJob:
    """What one request asks for.

    Attributes:
        submissions: what the engine runs, one per prompt.
        echoes: the text to return before the choices of each prompt.
        alone: the echo is all that is asked for; the token that the engine emits while it scores the prompt is dropped.
    """

    submissions: list[Submission]
    echoes: list[str]
    alone: bool

    @property
    def runs(self) -> bool:
        """Whether the engine has anything to do."""
        return not self.alone or self.scored

    @property
    def scored(self) -> bool:
        return self.submissions[0].params.logprobs is not None

    @property
    def num_choices(self) -> int:
        """Choices generated per prompt."""
        return self.submissions[0].params.num_choices


def completion_job(engine: EngineLike, body: CompletionRequest) -> CompletionJob:
    """Turns a request into what is to be done.

    Raises:
        RequestError, ApiError: a field is at fault.
    """
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    alone = bool(body.echo) and body.max_tokens == 0
    params = body.sampling(1 if alone else max_tokens)
    drafter, prediction = choose_drafter(engine, body)
    prompts = _prompts(body)
    echoes = [_echo_text(engine, item) if body.echo else "" for item in prompts]
    ids = [encode(engine, item, special=True, param="prompt") if isinstance(item, str) else item for item in prompts]
    return CompletionJob([Submission(item, params, drafter, prediction, body.scheduling()) for item in ids], echoes, alone)


def check_echo(engine: EngineLike, submissions: Sequence[Submission]) -> None:
    """The checks that the engine would make of prompts it does not get to see."""
    for item in submissions:
        if len(item.prompt_ids) > engine.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(item.prompt_ids)} tokens and the model takes {engine.max_model_len}: shorten it", param="prompt"
            )


async def completion_response(header: Header, ticket: Ticket | None, job: CompletionJob, texts: TokenTexts) -> dict[str, Any]:
    """The whole answer as one object; without a ticket nothing is generated, and the echo is all."""
    outputs = _unrun(job) if ticket is None else await gather(ticket)
    choices: list[dict[str, Any]] = []
    for place, (item, echo) in enumerate(zip(job.submissions, job.echoes, strict=True)):
        own = outputs[place * job.num_choices : (place + 1) * job.num_choices]
        kept = best_choices([output.logprobs for output in own], item.params.n) if len(own) > item.params.n else range(len(own))
        for output in (own[index] for index in kept):
            choices.append(
                {
                    "index": len(choices),
                    "text": echo if job.alone else echo + output.text,
                    "logprobs": _logprobs(job, item, own[0], output, CompletionLogprobs(texts)),
                    "finish_reason": "length" if job.alone else output.finish_reason,
                }
            )
    return {**header.fields("text_completion"), "choices": choices, "usage": _usage(job, outputs)}


async def completion_chunks(
    header: Header, ticket: Ticket | None, job: CompletionJob, texts: TokenTexts, *, include_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """The answer as chunks: the echo of each choice first, then its text, its finish once, and the usage last.

    Without a ticket nothing is generated, and the echo is all.
    """
    tail = {"usage": None} if include_usage else {}
    n = job.num_choices
    writers = [CompletionLogprobs(texts) for _ in range(n * len(job.submissions))]
    outputs: list[Output] = _unrun(job) if ticket is None else []

    def chunk(index: int, text: str, finish_reason: str | None = None, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**header.fields("text_completion"), "choices": [choice], **tail}

    def echo(place: int) -> list[dict[str, Any]]:
        """The echo to every choice of a prompt, with its logprobs if those are asked for: they have come by then."""
        item = job.submissions[place]
        indices = range(place * n, (place + 1) * n) if job.echoes[place] or item.params.prompt_logprobs is not None else ()
        scores = [_prompt_part(item, outputs[place * n], writers[index]) if job.scored else None for index in indices]
        return [chunk(index, job.echoes[place], logprobs=score) for index, score in zip(indices, scores, strict=True)]

    unsent = set(range(len(job.submissions)))
    for place in [] if job.scored else sorted(unsent):
        unsent.remove(place)
        for piece in echo(place):
            yield piece
    if ticket is None:
        for index in range(len(outputs)):
            yield chunk(index, "", "length")
    else:
        async for index, event in read(ticket, outputs):
            place = index // n
            if place in unsent and (event.token_ids or event.finish_reason is not None):
                unsent.remove(place)  # the first choice is the first to get a token, and its prompt has been scored then
                for piece in echo(place):
                    yield piece
            if not job.alone and (event.text or (job.scored and event.token_ids)):
                yield chunk(index, event.text, logprobs=writers[index].write(event.token_ids, event.logprobs) if job.scored else None)
            if event.finish_reason is not None:
                yield chunk(index, "", "length" if job.alone else event.finish_reason)
    if include_usage:
        yield {**header.fields("text_completion"), "choices": [], "usage": _usage(job, outputs)}


def _unrun(job: CompletionJob) -> list[Output]:
    return [Output(finish_reason="length") for _ in range(job.num_choices * len(job.submissions))]


def _usage(job: CompletionJob, outputs: Sequence[Output]) -> dict[str, Any]:
    if job.alone:
        outputs = [replace(output, num_tokens=0) for output in outputs]
    return usage(job.submissions, outputs)


def _logprobs(job: CompletionJob, item: Submission, first: Output, output: Output, writer: CompletionLogprobs) -> dict[str, Any] | None:
    """Those of a finished choice, after those of its prompt with `echo`; `first` is the choice that scored the prompt."""
    if item.params.logprobs is None:
        return None
    prompt = _prompt_part(item, first, writer) if item.params.prompt_logprobs is not None else empty_completion_logprobs()
    entries = [] if job.alone else output.logprobs
    emitted = writer.write([entry.token for entry in entries], entries)
    return {name: prompt[name] + emitted[name] for name in prompt}


def _prompt_part(item: Submission, first: Output, writer: CompletionLogprobs) -> dict[str, Any]:
    return writer.write(item.prompt_ids, [None, *first.prompt_logprobs])


def _prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt must not be empty", "prompt")
    items: list[Any] = list(prompt)  # all of one kind, as pydantic has checked
    return [items] if isinstance(items[0], int) else items


def _echo_text(engine: EngineLike, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if engine.tokenizer is None else str(engine.tokenizer.decode(prompt, skip_special_tokens=True))
