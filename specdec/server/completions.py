"""/v1/completions: prompts as texts or ids, `echo`, events to OpenAI objects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any  # JSON objects are open

from specdec.errors import ContextLengthError
from specdec.server.engine_loop import EngineLike, Submission, Ticket
from specdec.server.errors import bad_request
from specdec.server.generation import Header, Output, choose_drafter, encode, gather, read, usage
from specdec.server.protocol import COMPLETION_MAX_TOKENS, CompletionRequest


def completion_submissions(engine: EngineLike, body: CompletionRequest) -> tuple[list[Submission], list[str]]:
    """Turns a request into what the engine runs, one submission per prompt, and the text to echo before each.

    With `echo` and `max_tokens` 0 the engine has nothing to run; `echo_only` says so.

    Raises:
        RequestError, ApiError: a field is at fault.
    """
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            f"best_of is only supported equal to n, got best_of {body.best_of} and n {body.n or 1}", "best_of", "unsupported_field"
        )
    params = body.sampling(1 if echo_only(body) else max_tokens)
    drafter, prediction = choose_drafter(engine, body)
    prompts = _prompts(body)
    echoes = [_echo_text(engine, item) if body.echo else "" for item in prompts]
    ids = [encode(engine, item, special=True, param="prompt") if isinstance(item, str) else item for item in prompts]
    return [Submission(item, params, drafter, prediction) for item in ids], echoes


def echo_only(body: CompletionRequest) -> bool:
    """Whether nothing is to be generated."""
    return bool(body.echo) and body.max_tokens == 0


def check_echo(engine: EngineLike, submissions: Sequence[Submission]) -> None:
    """The checks that the engine would make of prompts it does not get to see."""
    for item in submissions:
        if len(item.prompt_ids) > engine.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(item.prompt_ids)} tokens and the model takes {engine.max_model_len}: shorten it", param="prompt"
            )


def echo_response(header: Header, submissions: Sequence[Submission], echoes: Sequence[str]) -> dict[str, Any]:
    """The answer to `echo` with `max_tokens` 0: the prompts themselves."""
    outputs = [Output(finish_reason="length") for item in submissions for _ in range(item.params.n)]
    return _whole(header, submissions, echoes, outputs)


async def completion_response(header: Header, ticket: Ticket, submissions: Sequence[Submission], echoes: Sequence[str]) -> dict[str, Any]:
    """The whole answer as one object."""
    return _whole(header, submissions, echoes, await gather(ticket))


async def completion_chunks(
    header: Header, ticket: Ticket | None, submissions: Sequence[Submission], echoes: Sequence[str], *, include_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """The answer as chunks: the echo of each choice first, then its text, its finish once, and the usage last.

    Without a ticket nothing is generated, and the echo is all.
    """
    tail = {"usage": None} if include_usage else {}

    def chunk(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {**header.fields("text_completion"), "choices": [choice], **tail}

    n = submissions[0].params.n
    outputs = [Output(finish_reason="length") for _ in range(n * len(submissions))]
    for index in range(len(outputs)):
        if echoes[index // n]:
            yield chunk(index, echoes[index // n])
        if ticket is None:
            yield chunk(index, "", "length")
    if ticket is not None:
        outputs = []
        async for index, event in read(ticket, outputs):
            if event.text:
                yield chunk(index, event.text)
            if event.finish_reason is not None:
                yield chunk(index, "", event.finish_reason)
    if include_usage:
        yield {**header.fields("text_completion"), "choices": [], "usage": usage(submissions, outputs)}


def _whole(header: Header, submissions: Sequence[Submission], echoes: Sequence[str], outputs: Sequence[Output]) -> dict[str, Any]:
    n = submissions[0].params.n
    choices = [
        {"index": index, "text": echoes[index // n] + output.text, "logprobs": None, "finish_reason": output.finish_reason}
        for index, output in enumerate(outputs)
    ]
    return {**header.fields("text_completion"), "choices": choices, "usage": usage(submissions, outputs)}


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
