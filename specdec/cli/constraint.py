"""Command-line options that say what an output must match; the command gets them as one `constraint`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specdec.errors import ConfigError
from specdec.request import Constraint

Command = Callable[..., Any]  # click callbacks take the options as keyword arguments


def constraint_options(command: Command) -> Command:
    """Adds `--json-schema`, `--regex`, `--choice`, `--grammar` and `--after`."""

    @functools.wraps(command)
    def wrapper(
        json_schema: Path | None, regex: str | None, choice: tuple[str, ...], grammar: Path | None, after: str, **options: Any
    ) -> Any:
        return command(constraint=_constraint(json_schema, regex, choice, grammar, after), **options)

    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    decorated: Command = wrapper
    for option in (
        click.option("--after", default="", help="The constraint begins behind the first occurrence of this text, such as </think>."),
        click.option(
            "--grammar", type=file, help="A file with a grammar that the output must match: EBNF where it holds '::=', else Lark."
        ),
        click.option("--choice", multiple=True, help="The output must be one of these; may be repeated."),
        click.option("--regex", help="A regular expression that the whole output must match."),
        click.option("--json-schema", type=file, help="A file with a JSON schema that the output must match."),
    ):
        decorated = option(decorated)
    return decorated


def _constraint(schema: Path | None, regex: str | None, choices: tuple[str, ...], grammar: Path | None, after: str) -> Constraint | None:
    rules = grammar.read_text("utf-8") if grammar is not None else ""
    given = {
        "--json-schema": ("json_schema", schema.read_text("utf-8")) if schema is not None else None,
        "--regex": ("regex", regex) if regex is not None else None,
        "--choice": ("choice", json.dumps(choices, ensure_ascii=False)) if choices else None,
        "--grammar": ("ebnf" if "::=" in rules else "lark", rules) if grammar is not None else None,
    }
    found = {flag: what for flag, what in given.items() if what is not None}
    if len(found) > 1:
        raise ConfigError(f"give one of {', '.join(given)}; got {' and '.join(found)}")
    if not found:
        if after:
            raise ConfigError(f"--after says where a constraint begins: give one of {', '.join(given)} with it")
        return None
    ((kind, text),) = found.values()
    return Constraint(kind, text, after)
