"""/v1/chat/completions: messages to ids by the model's chat template, events to OpenAI objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any  # JSON objects are open

from specdec.chat import encode_chat
from specdec.server.engine_loop import EngineLike, Submission, Ticket
from specdec.server.generation import Header, Output, choose_drafter, gather, read, usage
from specdec.server.logprobs import TokenTexts, chat_logprobs
from specdec.server.protocol import ChatRequest, content_text


def chat_submission(engine: EngineLike, body: ChatRequest) -> Submission:
    """Turns a request into what the engine runs. Raises RequestError or ApiError."""
    messages = [
        {"role": message.role, "content": content_text(message.content), **({"name": message.name} if message.name else {})}
        for message in body.messages
    ]
    params = body.sampling(body.token_limit)
    drafter, prediction = choose_drafter(engine, body)
    return Submission(encode_chat(engine.tokenizer, messages), params, drafter, prediction, body.scheduling())


async def chat_response(header: Header, ticket: Ticket, submission: Submission, texts: TokenTexts) -> dict[str, Any]:
    """The whole answer as one object."""
    outputs = await gather(ticket)
    scored = submission.params.logprobs is not None
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": chat_logprobs(output.logprobs, texts) if scored else None,
            "finish_reason": output.finish_reason,
        }
        for index, output in enumerate(outputs)
    ]
    return {**header.fields("chat.completion"), "choices": choices, "usage": usage([submission], outputs)}


async def chat_chunks(
    header: Header, ticket: Ticket, submission: Submission, texts: TokenTexts, *, include_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """The answer as chunks: the role of each choice first, then its text, its finish once, and the usage last."""
    tail = {"usage": None} if include_usage else {}
    scored = submission.params.logprobs is not None

    def chunk(
        index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**header.fields("chat.completion.chunk"), "choices": [choice], **tail}

    for index in range(len(ticket.choices)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    outputs: list[Output] = []
    async for index, event in read(ticket, outputs):
        if event.text or (scored and event.token_ids):
            yield chunk(index, {"content": event.text}, logprobs=chat_logprobs(event.logprobs, texts) if scored else None)
        if event.finish_reason is not None:
            yield chunk(index, {}, event.finish_reason)
    if include_usage:
        yield {**header.fields("chat.completion.chunk"), "choices": [], "usage": usage([submission], outputs)}
