"""JSON-schema decoding with drafts against the same without: validity, equality of the ids, tokens per second.

    python benchmarks/json_schemas.py --prompts bfcl_tools.jsonl [--model MODEL] [--drafter SPEC ...]

Schemas are made of the functions that BFCL prompts describe, and ten are written by hand. Everything in them is given an
upper size, so that an answer ends before `--max-tokens` even where the model would write for ever. Each request runs alone,
once per drafter and in turn, so that a slow moment of the machine hits all; seconds are the least of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: spinning threads disturb each other

import jsonschema
import torch

from specdec.llm import LLM, Choice
from specdec.request import Constraint, SamplingParams

Schema = dict[str, Any]  # JSON
Case = tuple[str, Schema]

_NAMES = {"dict": "object", "float": "number", "tuple": "array"}  # BFCL's types, which are Python's
_BOUNDS: dict[str, Schema] = {
    "string": {"maxLength": 60},
    "array": {"maxItems": 4},
    "integer": {"minimum": -1_000_000, "maximum": 1_000_000},
    "number": {"minimum": -1_000_000, "maximum": 1_000_000, "multipleOf": 0.01},
}


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    cases = [*hand_written(), *bfcl(options.prompts)][: options.limit]
    llm = LLM(options.model, max_num_seqs=1, prefix_cache=False, progress=lambda line: print(line, file=sys.stderr))
    prompts = [llm.chat_ids([{"role": "user", "content": text}]) for text, _ in cases]
    for temperature in options.temperature:
        columns = {spec: Column() for spec in ("off", *options.drafter)}
        for index, ((_, schema), prompt) in enumerate(zip(cases, prompts, strict=True)):
            text = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}} if options.compact else schema)
            constraint = Constraint("json_schema", text)
            llm.engine.compile(constraint)
            params = SamplingParams(temperature=temperature, seed=index, max_tokens=options.max_tokens, constraint=constraint)
            expected: Choice | None = None
            for repeat in range(options.repeats):
                for spec, column in columns.items():
                    start = time.perf_counter()
                    (output,) = llm.generate([prompt], params, drafter=spec)
                    column.times.setdefault(index, []).append(time.perf_counter() - start)
                    expected = expected or output.choices[0]
                    if repeat == 0:
                        column.add(output.choices[0], expected, schema)
            print(f"{index + 1:3} {expected.text[:120] if expected else ''}", file=sys.stderr)
        print_table(columns, temperature)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, type=Path, help="JSON lines of {id, category, turns} with BFCL's single-turn prompts")
    parser.add_argument("--model", default="demo", help="GGUF file, folder or hub id")
    parser.add_argument("--drafter", nargs="+", default=["ngram", "grammar", "grammar+ngram"], help="specs that need no loading")
    parser.add_argument("--limit", type=int, default=50, help="schemas")
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--compact", action="store_true", help="no white space between JSON tokens, which leaves more without a choice")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


@dataclass
class Column:
    """What one drafter came to."""

    times: dict[int, list[float]] = field(default_factory=dict)
    count: int = 0
    valid: int = 0
    equal: int = 0
    tokens: int = 0
    emitted: int = 0
    verifies: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, choice: Choice, expected: Choice, schema: Schema) -> None:
        stats = choice.stats
        self.count += 1
        self.valid += is_valid(choice, schema)
        self.equal += (choice.token_ids, choice.text, choice.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)
        self.tokens += len(choice.token_ids)
        self.emitted += stats.emitted
        self.verifies += stats.verifies
        self.drafted += stats.drafted
        self.accepted += stats.accepted

    @property
    def speed(self) -> float:
        return self.tokens / sum(min(times) for times in self.times.values())


def is_valid(choice: Choice, schema: Schema) -> bool:
    try:
        jsonschema.validate(json.loads(choice.text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"    INVALID ({choice.finish_reason}): {choice.text[:200]!r}: {str(error).splitlines()[0]}", file=sys.stderr)
        return False
    return choice.finish_reason == "stop"


def print_table(columns: dict[str, Column], temperature: float) -> None:
    print(f"\ntemperature {temperature:g}, {columns['off'].count} schemas, seconds include the prompt")
    print(f"{'drafter':16}{'valid':>8}{'equal':>8}{'tokens':>8}{'tok/s':>9}{'x off':>7}{'length':>8}{'drafted':>9}{'accepted':>9}")
    for spec, column in columns.items():
        length = column.emitted / max(1, column.verifies)
        print(
            f"{spec:16}{column.valid:>8}{column.equal:>8}{column.tokens:>8}{column.speed:>9.1f}{column.speed / columns['off'].speed:>7.2f}"
            f"{length:>8.2f}{column.drafted:>9}{column.accepted:>9}"
        )


def bfcl(path: Path) -> list[Case]:
    """A prompt, and the schema of a call of the function that it describes."""
    cases = []
    for line in path.read_text("utf-8").splitlines():
        turns = json.loads(line)["turns"]
        described = re.search(r"\[\s*\{.*\}\s*\]", turns[0], re.S)
        if len(turns) == 1 and described:
            function = json.loads(described.group(0))[0]
            arguments = bounded(as_json_schema(function["parameters"]))
            properties = {"name": {"const": function["name"]}, "arguments": arguments}
            cases.append((turns[0], closed(properties)))
    return cases


def as_json_schema(schema: Schema) -> Schema:
    """BFCL's description of a parameter as a JSON schema: its types renamed, and what only informs dropped."""
    kind = _NAMES.get(schema.get("type", "any"), schema.get("type", "any"))
    kept = {key: schema[key] for key in ("required", "enum") if key in schema}
    if "enum" in schema and "items" not in schema:
        return {"enum": schema["enum"]}
    if kind == "object" and schema.get("properties"):
        properties = {name: as_json_schema(value) for name, value in schema["properties"].items()}
        return {**closed(properties), "required": schema.get("required", [])}
    if kind == "array":
        return {"type": "array", "items": as_json_schema(schema.get("items", {"type": "string"}))}
    return {"type": "string"} if kind in ("any", "object") else {"type": kind, **kept}


def closed(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def bounded(value: Any) -> Any:  # JSON
    """The schema with an upper size for everything that has a type."""
    if isinstance(value, list):
        return [bounded(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    plain = isinstance(kind, str) and "enum" not in value and "const" not in value
    bounds = _BOUNDS.get(kind, {}) if plain else {}  # type: ignore[arg-type]  # a text
    return {**bounds, **{key: bounded(item) for key, item in value.items()}}


def hand_written() -> list[Case]:
    """Ten schemas with what BFCL has none of: references, unions, patterns, formats, constants, nesting."""
    text, whole, flag = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 9999}, {"type": "boolean"}
    day = {"type": "string", "format": "date"}
    node = {"type": "object", "properties": {"value": whole, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}}}
    leaf = {"type": "object", "properties": {"value": whole}, "required": ["value"], "additionalProperties": False}
    return [
        ("Describe a person as JSON.", closed({"name": text, "age": whole, "married": flag})),
        (
            "When and where is the next conference? Answer in JSON.",
            closed({"title": text, "date": day, "city": {"enum": ["Oslo", "Rome"]}}),
        ),
        (
            "Give three tags for a photo of a cat, as JSON.",
            closed({"tags": {"type": "array", "items": text, "minItems": 3, "maxItems": 3}}),
        ),
        (
            "Write a linked list with two values as JSON.",
            {"$defs": {"leaf": leaf}, **node, "required": ["value", "next"], "additionalProperties": False},
        ),
        ("Give a license plate as JSON.", closed({"plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}-[A-Z]{2}$"}})),
        (
            "Is the sky blue? Answer in JSON.",
            {"anyOf": [closed({"answer": {"const": "yes"}}), closed({"answer": {"const": "no"}, "why": text})]},
        ),
        (
            "Describe a shop as JSON.",
            closed(
                {
                    "shop": closed(
                        {
                            "name": text,
                            "address": closed({"street": text, "number": whole, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}),
                        }
                    )
                }
            ),
        ),
        (
            "Give two points as JSON.",
            closed({"points": {"type": "array", "minItems": 2, "maxItems": 2, "items": closed({"x": whole, "y": whole})}}),
        ),
        (
            "Rate the film Alien as JSON.",
            closed(
                {"film": {"const": "Alien"}, "stars": {"enum": [1, 2, 3, 4, 5]}, "review": {"type": ["string", "null"], "maxLength": 60}}
            ),
        ),
        (
            "Describe an e-mail as JSON.",
            closed({"to": {"type": "string", "format": "email", "maxLength": 40}, "subject": text, "urgent": flag}),
        ),
    ]


if __name__ == "__main__":
    main()
