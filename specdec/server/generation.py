"""What chat and text completions share: reading a ticket to its end, drafters, usage. Knows nothing of HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any  # JSON objects are open

from specdec.drafter_spec import parse_drafter_spec
from specdec.errors import ConfigError, RequestError
from specdec.plan import Event, TokenLogprobs
from specdec.request import RequestStats
from specdec.server.engine_loop import EngineLike, Submission, Ticket
from specdec.server.errors import ApiError, bad_request
from specdec.server.protocol import GenerationRequest, content_text
from specdec.verifier.verifier import ALL_BANNED


@dataclass(frozen=True)
class Header:
    """The fields that every object of one answer repeats."""

    prefix: str
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


@dataclass
class Output:
    """One choice as it comes in."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


async def read(ticket: Ticket, outputs: list[Output]) -> AsyncIterator[tuple[int, Event]]:
    """Events until every choice has finished; `outputs` is filled with one Output per choice, complete by then.

    Raises:
        ApiError: a choice failed or was ended by the server.
        EngineDeadError: the engine has ended.
    """
    outputs.extend(Output() for _ in ticket.choices)
    left = len(outputs)
    while left:
        index, event = await ticket.next()
        if event.finish_reason == "error" and event.error == ALL_BANNED:
            raise bad_request(ALL_BANNED, code="no_token_left")
        if event.finish_reason == "error":
            raise ApiError(500, f"generation failed: {event.error or 'no reason was given'}", code="generation_failed")
        if event.finish_reason == "abort":
            raise ApiError(503, "the request was aborted by the server", code="aborted")
        output = outputs[index]
        output.text += event.text
        output.num_tokens += len(event.token_ids)
        output.logprobs += event.logprobs
        output.prompt_logprobs += event.prompt_logprobs
        output.finish_reason = event.finish_reason
        output.stats = event.stats
        left -= event.finish_reason is not None
        yield index, event


async def gather(ticket: Ticket) -> list[Output]:
    """All outputs of a ticket, in order."""
    outputs: list[Output] = []
    async for _ in read(ticket, outputs):
        pass
    return outputs


def usage(submissions: Sequence[Submission], outputs: Sequence[Output]) -> dict[str, Any]:
    """Token counts. A prompt counts once however many choices it has; a stop token, and a choice not returned, as completion."""
    prompt = sum(len(item.prompt_ids) for item in submissions)
    completion = sum(output.num_tokens for output in outputs)
    per_prompt = len(outputs) // max(1, len(submissions))
    cached = sum(output.stats.cached_prompt_tokens for output in outputs[::per_prompt]) if per_prompt else 0
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "speculative": speculative_usage([output.stats for output in outputs]),
    }
    if any(item.prediction for item in submissions):
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": sum(output.stats.accepted for output in outputs),
            "rejected_prediction_tokens": sum(output.stats.wasted for output in outputs),
        }
    return counts


def speculative_usage(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """What drafting brought and where the seconds went, all choices together; the words are those of RequestStats."""
    verifies = sum(one.verifies for one in stats)
    seconds = ("queue_s", "prefill_s", "draft_s", "verify_s", "sample_s", "commit_s", "host_s")
    drafters = dict.fromkeys(name for one in stats for name in one.draft_by)
    return {
        "drafted": sum(one.drafted for one in stats),
        "accepted": sum(one.accepted for one in stats),
        "acceptance_length": sum(one.emitted for one in stats) / verifies if verifies else 1.0,
        "speedup": speedup(stats),
        **{name: round(sum(getattr(one, name) for one in stats), 6) for name in seconds},
        "draft_by": {name: round(sum(one.draft_by.get(name, 0.0) for one in stats), 6) for name in drafters},
    }


def speedup(stats: Sequence[RequestStats]) -> float:
    """How many times faster than without drafts, by the estimate of the cost model; pooled, 1.0 where nothing decoded."""
    off_s, decode_s = sum(one.off_s for one in stats), sum(one.decode_s for one in stats)
    return round(off_s / decode_s, 4) if off_s > 0 and decode_s > 0 else 1.0


def choose_drafter(engine: EngineLike, body: GenerationRequest) -> tuple[str | None, list[int]]:
    """The drafter a request runs with (None is the engine's default), and the ids of its predicted output.

    A request that brings a prediction and names no drafter gets the `prediction` drafter, unless the default has it.

    Raises:
        RequestError: the spec cannot be read, or a prediction is given to `off`.
    """
    drafter = body.speculative.drafter if body.speculative is not None else None
    if drafter is not None:
        _names(drafter)
    if body.prediction is None:
        return drafter, []
    if drafter is not None and not _names(drafter):
        raise RequestError("a prediction needs a drafter: speculative.drafter is 'off'", param="prediction")
    if drafter is None and "prediction" not in _names(engine.config.drafter):
        drafter = "prediction"
    return drafter, encode(engine, content_text(body.prediction.content), special=False, param="prediction")


def encode(engine: EngineLike, text: str, *, special: bool, param: str) -> list[int]:
    """Text to ids. Raises RequestError where the model has no tokenizer."""
    if engine.tokenizer is None:
        raise RequestError("this model comes without a tokenizer: send the prompt as token ids to /v1/completions", param=param)
    return list(engine.tokenizer.encode(text, add_special_tokens=special))


def _names(spec: str) -> list[str]:
    try:
        return [part.name for part in parse_drafter_spec(spec)]
    except ConfigError as error:
        raise RequestError(str(error), param="speculative.drafter") from None
