"""Request bodies of the OpenAI API, checked strictly: what is not supported is a 400 that names the field, never silence.

A field that this server does not support is accepted where its value changes nothing (null, 0, false, ...).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec.errors import RequestError
from specdec.request import MAX_LOGPROBS, VERIFY_RULES, SamplingParams, Scheduling
from specdec.server.errors import bad_request
from specdec.server.response_format import ResponseFormat, StructuredOutputs, constraint_of

COMPLETION_MAX_TOKENS = 16
"""The default of OpenAI's /v1/completions; a chat runs to the context limit."""

# Fields that are not supported -> the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
# Fields that never change the output.
_IGNORED = ("metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")


# Fields that are sampling parameters of the same name and kind.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "n", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "allowed_token_ids"),
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """`include_usage`: send a last chunk with the usage and no choices."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Speculative(_Strict):
    """How to draft for this request, and how to verify; what is left out is the engine's."""

    drafter: str | None = None
    verify_rule: str | None = None
    max_draft: int | None = None


class TextPart(_Strict):
    """A text content part."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


def content_text(content: Content) -> str:
    """The text of a message or prediction."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(_Strict):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: Content


class Message(_Strict):
    """A chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None


class GenerationRequest(_Strict):
    """What chat and text completions share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str | list[int]] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: Speculative | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    target_itl_ms: float | None = None
    target_ttft_ms: float | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """The sampling parameters; fields that were not given keep OpenAI's defaults. Raises RequestError or ApiError."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            given["logit_bias"] = _bias(self.logit_bias)
        if self.speculative is not None and self.speculative.verify_rule is not None:
            rule = given["verify_rule"] = self.speculative.verify_rule
            if rule not in VERIFY_RULES:
                raise bad_request(f"verify_rule must be one of {', '.join(VERIFY_RULES)}, got {rule!r}", "speculative.verify_rule")
        given["constraint"] = constraint_of(self.response_format, self.structured_outputs)
        return SamplingParams.from_dict({"max_tokens": max_tokens, **given, **self.scoring()})

    def scheduling(self) -> Scheduling:
        """When it runs, and with how much draft. Raises RequestError."""
        try:
            return Scheduling(
                priority=self.priority or 0,
                max_draft=self.speculative.max_draft if self.speculative is not None else None,
                target_itl_ms=self.target_itl_ms,
                target_ttft_ms=self.target_ttft_ms,
                user=self.user or "",
            )
        except RequestError as error:
            error.param = "speculative.max_draft" if error.param == "max_draft" else error.param
            raise

    def scoring(self) -> dict[str, Any]:
        """The sampling parameters that say which tokens are scored, and how many choices for which."""
        raise NotImplementedError


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def scoring(self) -> dict[str, Any]:
        top = self.top_logprobs or 0
        if top and not self.logprobs:
            raise bad_request("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        if not 0 <= top <= MAX_LOGPROBS:
            raise bad_request(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", "top_logprobs")
        return {"logprobs": top} if self.logprobs else {}

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, or the older `max_tokens`."""
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            raise bad_request(f"max_tokens is {old} and max_completion_tokens is {new}: give one of them", "max_completion_tokens")
        return new if new is not None else old


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None

    def scoring(self) -> dict[str, Any]:
        best_of = self.best_of if self.best_of != (self.n or 1) else None
        if best_of is not None and self.stream:
            raise bad_request(
                f"best_of above n cannot be streamed, since the best are known at the end only: got best_of {best_of} and n {self.n or 1}",
                "best_of",
            )
        return {"best_of": best_of, "logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}


Body = TypeVar("Body", bound=GenerationRequest)


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """Reads a JSON body. Raises ApiError 400 that names the field at fault."""
    values = _read_json(raw)
    for name, neutral in _NEUTRAL.items():
        if name in values and name not in kind.model_fields:
            value = values.pop(name)
            if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral):
                allowed_text = " or ".join(json.dumps(allowed) for allowed in neutral)
                raise bad_request(
                    f"{name} is not supported by this server: leave it out, or send {allowed_text}", name, "unsupported_field"
                )
    for name in _IGNORED:
        values.pop(name, None)
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        raise _explain(error, kind) from None
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    return body


def _read_json(raw: bytes) -> dict[str, Any]:
    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise bad_request(f"the field {twice!r} is given twice", twice)
        return values

    try:
        text = raw.decode("utf-8")
        values = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=unique)
        # an escape such as \ud800 gives half a character, which no tokenizer can take
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise bad_request("the body is not valid UTF-8, or a text in it holds half of a surrogate pair", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise bad_request(f"the body must be a JSON object, got {type(values).__name__}", code="invalid_json")
    return values


def _explain(error: ValidationError, kind: type[GenerationRequest]) -> Exception:
    """The first fault as a 400; `param` is the path of the field, without pydantic's names of union members."""
    detail = error.errors(include_url=False, include_context=False)[0]
    first, *rest = detail["loc"]
    union_member = {"str", "int", "StreamOptions", "list[int]"}
    path = str(first)
    for step in rest:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in union_member and "[" not in step:
            path += f".{step}"
    if detail["type"] == "extra_forbidden":
        known = ", ".join(_fields_at(kind, detail["loc"][:-1]))
        return bad_request(f"unknown field {path!r}; known: {known}", path, "unknown_field")
    if detail["type"] == "missing":
        return bad_request(f"{path} is required", path, "missing_field")
    return bad_request(f"{path}: {detail['msg']}, got {_short(detail['input'])}", path)


def _fields_at(kind: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    """Names of the fields that the object at a path may have; steps that are no field, such as a list's index, lead nowhere."""
    models = [kind]
    for step in path:
        inner = [own for model in models if step in model.model_fields for own in _models_in(model.model_fields[str(step)].annotation)]
        models = inner or models
    return sorted({name for model in models for name in model.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:  # of a field: a class, or unions and lists of such
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    """OpenAI's mapping of token ids, which JSON makes texts of."""
    wrong = next((token for token in bias if not (token.isascii() and token.isdecimal())), None)
    if wrong is not None:
        raise bad_request(f"logit_bias must map token ids to numbers, got the key {wrong!r}", "logit_bias")
    return {int(token): addend for token, addend in bias.items()}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
