"""A Constraint as grammar text of llguidance. Checks form only: what a grammar means is found out by compiling it."""

from __future__ import annotations

import json
from typing import Any

from specdec.errors import RequestError
from specdec.request import Constraint

MAX_WHITESPACE = 40
"""Characters of white space between two JSON tokens: enough for indented text, and an end to a model that only indents."""


def grammar_text(constraint: Constraint) -> str:
    """The grammar of a constraint, in the form that `llguidance.LLMatcher` takes.

    Raises:
        RequestError: the text cannot be read as what `kind` says it is.
    """
    from llguidance import LLMatcher

    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.text)
    if constraint.kind == "choice":
        return LLMatcher.grammar_from_lark(_choices(constraint.text))
    if constraint.kind == "lark":
        return LLMatcher.grammar_from_lark(constraint.text)
    if constraint.kind == "ebnf":
        return LLMatcher.grammar_from_lark(_lark_of(constraint.text))
    return _json_grammar({"type": "object"} if constraint.kind == "json_object" else _parsed(constraint.text, "the JSON schema"))


def _json_grammar(schema: Any) -> str:  # a JSON value
    from llguidance import LLMatcher

    if not isinstance(schema, dict):
        raise RequestError(f"the JSON schema must be an object, got {json.dumps(schema)[:80]}", param="constraint")
    if "x-guidance" in schema:  # llguidance's own options: its author says what white space may be
        return LLMatcher.grammar_from_json_schema(schema)
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"})


def _choices(text: str) -> str:
    choices = _parsed(text, "the list of choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError(f"choices must be a list of one or more non-empty texts, got {text[:80]}", param="constraint")
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def _lark_of(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # it raises Exception itself for an unknown or missing rule
        raise RequestError(f"the EBNF grammar cannot be read: {error}", param="constraint") from None


def _parsed(text: str, what: str) -> Any:  # a JSON value
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not valid JSON: {error}", param="constraint") from None
