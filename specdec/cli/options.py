"""Command-line options of EngineConfig, generated from the dataclass: a field added there is an option here."""

from __future__ import annotations

import functools
import inspect
import json
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields
from typing import Any, get_args, get_type_hints

import click

from specdec.config import DTYPES, EngineConfig
from specdec.request import VERIFY_RULES

Command = Callable[..., Any]  # click callbacks take the options as keyword arguments

_CHOICES: Mapping[str, tuple[str, ...]] = {"dtype": DTYPES, "verify_rule": VERIFY_RULES}
_EXTRA_NAMES: Mapping[str, tuple[str, ...]] = {"verify_rule": ("--rule",)}


def engine_options(
    *, without: Collection[str] = (), extra: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
) -> Callable[[Command], Command]:
    """Adds the MODEL argument, one option per EngineConfig field and `--show-config`.

    The command gets `config: EngineConfig` in place of them.

    Args:
        without: fields that the command sets by itself.
        extra: makes, of the command's own options, what `--show-config` shows beside the engine's.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(show_config: bool, **options: Any) -> Any:
            values = {name: options.pop(name) for name in _option_fields(without)}
            config = EngineConfig.from_dict({"model": options.pop("model"), **values})
            if show_config:
                click.echo(json.dumps({**config.to_dict(), **(extra(options) if extra else {})}, indent=2))
                return 0
            return command(config=config, **options)

        decorated: Command = click.option("--show-config", is_flag=True, help="Print the effective configuration as JSON and exit.")(
            wrapper
        )
        for option in reversed(list(_option_fields(without).values())):
            decorated = option(decorated)
        return click.argument("model", default=EngineConfig.model, metavar="[MODEL]")(decorated)

    return decorate


def _option_fields(without: Collection[str]) -> dict[str, Callable[[Command], Command]]:
    hints, texts = get_type_hints(EngineConfig), _attribute_texts()
    return {
        field.name: _option(field, hints[field.name], texts[field.name])
        for field in fields(EngineConfig)
        if field.name != "model" and field.name not in without
    }


def _option(field: Field[Any], hint: Any, text: str) -> Callable[[Command], Command]:
    flag = field.name.replace("_", "-")
    names = [field.name, f"--{flag}", *_EXTRA_NAMES.get(field.name, ())]
    if hint is bool:
        return click.option(field.name, f"--{flag}/--no-{flag}", default=field.default, show_default=True, help=text)
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    choice = click.Choice(_CHOICES[field.name]) if field.name in _CHOICES else kind
    return click.option(*names, type=choice, default=field.default, show_default=field.default is not None, help=text)


def _attribute_texts() -> dict[str, str]:
    """What the docstring of EngineConfig says about each attribute: the one place that describes the options."""
    section = inspect.cleandoc(EngineConfig.__doc__ or "").partition("Attributes:")[2]
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            texts[name] = text
        elif line.strip():
            texts[name] += " " + line.strip()
    return {name: text.replace("`", "") for name, text in texts.items()}
