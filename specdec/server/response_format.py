"""`response_format` of OpenAI and `structured_outputs` of vLLM: what an answer must match, as a Constraint."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec.errors import RequestError
from specdec.request import Constraint
from specdec.server.errors import bad_request


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class JsonSchema(_Strict):
    """A named schema. `strict` changes nothing: an answer always keeps to its schema."""

    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = {}  # pydantic copies defaults
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> tuple[str, str] | None:
        """(kind, text) of a Constraint."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise bad_request(
                f"response_format.json_schema belongs to the type json_schema, and to no other; got type {self.type}",
                "response_format.json_schema",
            )
        if self.json_schema is not None:
            return "json_schema", json.dumps(self.json_schema.json_schema, ensure_ascii=False)
        return ("json_object", "") if self.type == "json_object" else None


class StructuredOutputs(_Strict):
    """vLLM's, and `after`: the answer is free up to the first occurrence of that text, such as `</think>`.

    `grammar` is EBNF where it holds `::=`, else Lark. `disable_any_whitespace` and `whitespace_pattern` are about JSON.
    """

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    after: str | None = None

    def constraint(self) -> tuple[str, str] | None:
        """(kind, text) of a Constraint; None where only `after` is given."""
        given = {
            "json": self.json_,
            "json_object": self.json_object or None,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise bad_request(f"structured_outputs takes one of {', '.join(given)}; got {' and '.join(named)}", "structured_outputs")
        if (self.disable_any_whitespace or self.whitespace_pattern is not None) and named not in (["json"], ["json_object"]):
            field = "whitespace_pattern" if self.whitespace_pattern is not None else "disable_any_whitespace"
            raise bad_request(f"structured_outputs.{field} is about JSON: give json or json_object with it", f"structured_outputs.{field}")
        if self.json_ is not None or self.json_object:
            return "json_schema", self._schema({"type": "object"} if self.json_ is None else self.json_)
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", json.dumps(self.choice, ensure_ascii=False)
        if self.grammar is not None:
            return "ebnf" if "::=" in self.grammar else "lark", self.grammar
        return None

    def _schema(self, schema: dict[str, Any] | str) -> str:
        """The schema as text, with llguidance's own options for what is asked of white space."""
        options: dict[str, Any] = {}
        if self.disable_any_whitespace:
            options["whitespace_flexible"] = False
        if self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        if isinstance(schema, str):
            if not options:
                return schema
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise bad_request(f"structured_outputs.json is not valid JSON: {error}", "structured_outputs.json") from None
            if not isinstance(schema, dict):
                raise bad_request("structured_outputs.json must be an object", "structured_outputs.json")
        return json.dumps({**schema, "x-guidance": options} if options else schema, ensure_ascii=False)


def constraint_of(response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None) -> Constraint | None:
    """The constraint that the two fields ask for, if any. Raises ApiError."""
    form = response_format.constraint() if response_format is not None else None
    own = structured_outputs.constraint() if structured_outputs is not None else None
    if form is not None and own is not None:
        raise bad_request("response_format and structured_outputs both constrain the answer: give one of them", "structured_outputs")
    after = (structured_outputs.after or "") if structured_outputs is not None else ""
    found = form or own
    if found is None:
        if structured_outputs is not None:
            raise bad_request(
                "structured_outputs takes one of json, json_object, regex, choice, grammar; got none of them", "structured_outputs"
            )
        return None
    try:
        return Constraint(*found, after=after)
    except RequestError as error:
        raise bad_request(str(error), constraint_field(response_format)) from None


def constraint_field(response_format: ResponseFormat | None) -> str:
    """The field that a constraint came from, to name in errors."""
    return "structured_outputs" if response_format is None or response_format.type == "text" else "response_format"
