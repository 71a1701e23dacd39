"""Command-line options of EngineConfig and SamplingParams, generated from the dataclasses and their docstrings."""

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
from specdec.request import VERIFY_RULES, SamplingParams

Command = Callable[..., Any]  # click callbacks take the options as keyword arguments

_CHOICES: Mapping[str, tuple[str, ...]] = {"dtype": DTYPES, "verify_rule": VERIFY_RULES}
_EXTRA_NAMES: Mapping[str, tuple[str, ...]] = {
    "verify_rule": ("--rule",),
    "target_itl_ms": ("--target-itl",),
    "target_ttft_ms": ("--target-ttft",),
}

# Fields of SamplingParams that a command line can set -> its own default, where that is another one.
_SAMPLING: Mapping[str, Any] = {
    **dict.fromkeys(("max_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p")),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words")),
    **dict.fromkeys(("allowed_token_ids", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "logprobs")),
    "max_tokens": 256,
    "temperature": 0.0,
}


_NO_DEFAULTS: Mapping[str, Any] = {}


def _bias(value: str) -> tuple[int, float]:
    """`ID=NUMBER` as a pair."""
    token, _, addend = value.partition("=")
    try:
        return int(token), float(addend)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a token id, '=' and a number, as in 198=-100") from None


# Options that may be repeated: their name, and the kind of each value.
_REPEATED: Mapping[str, tuple[str, Any]] = {
    "logit_bias": ("--logit-bias", _bias),
    "bad_words": ("--bad-word", str),
    "allowed_token_ids": ("--allowed-token-id", int),
    "stop": ("--stop", str),
    "stop_token_ids": ("--stop-token-id", int),
}


def engine_options(
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] = _NO_DEFAULTS,
    extra: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Callable[[Command], Command]:
    """Adds the MODEL argument, one option per EngineConfig field and `--show-config`.

    The command gets `config: EngineConfig` in place of them.

    Args:
        without: fields that the command sets by itself.
        defaults: those of the command, where they are not the engine's.
        extra: makes, of the command's own options, what `--show-config` shows beside the engine's.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(show_config: bool, **options: Any) -> Any:
            values = {name: options.pop(name) for name in _option_fields(without, defaults)}
            config = EngineConfig.from_dict({"model": options.pop("model"), **values})
            if show_config:
                click.echo(json.dumps({**config.to_dict(), **(extra(options) if extra else {})}, indent=2))
                return 0
            return command(config=config, **options)

        decorated: Command = click.option("--show-config", is_flag=True, help="Print the effective configuration as JSON and exit.")(
            wrapper
        )
        for option in reversed(list(_option_fields(without, defaults).values())):
            decorated = option(decorated)
        return click.argument("model", default=EngineConfig.model, metavar="[MODEL]")(decorated)

    return decorate


def sampling_options(command: Command) -> Command:
    """Adds one option per field of SamplingParams that a command line can set; the command gets them by the fields' names."""
    hints, texts = get_type_hints(SamplingParams), _attribute_texts(SamplingParams)
    for field in reversed(fields(SamplingParams)):
        if field.name in _REPEATED:
            flag, kind = _REPEATED[field.name]
            text = f"{texts[field.name]} May be repeated."
            metavar = "ID=NUMBER" if kind is _bias else None
            command = click.option(field.name, flag, type=kind, multiple=True, metavar=metavar, help=text)(command)
        elif field.name in _SAMPLING:
            default = _SAMPLING[field.name]
            command = _option(field, hints[field.name], texts[field.name], field.default if default is None else default)(command)
    return command


def _option_fields(without: Collection[str], defaults: Mapping[str, Any]) -> dict[str, Callable[[Command], Command]]:
    hints, texts = get_type_hints(EngineConfig), _attribute_texts(EngineConfig)
    return {
        field.name: _option(field, hints[field.name], texts[field.name], defaults.get(field.name, field.default))
        for field in fields(EngineConfig)
        if field.name != "model" and field.name not in without
    }


def _option(field: Field[Any], hint: Any, text: str, default: Any) -> Callable[[Command], Command]:
    flag = field.name.replace("_", "-")
    names = [field.name, f"--{flag}" if len(flag) > 1 else f"-{flag}", *_EXTRA_NAMES.get(field.name, ())]
    if hint is bool:
        return click.option(field.name, f"--{flag}/--no-{flag}", default=default, show_default=True, help=text)
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    choice = click.Choice(_CHOICES[field.name]) if field.name in _CHOICES else kind
    return click.option(*names, type=choice, default=default, show_default=default is not None, help=text)


def _attribute_texts(described: type) -> dict[str, str]:
    """What the docstring of a class says about each attribute: the one place that describes the options."""
    section = inspect.cleandoc(described.__doc__ or "").partition("Attributes:")[2]
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            texts[name] = text
        elif line.strip():
            texts[name] += " " + line.strip()
    return {name: text.replace("`", "") for name, text in texts.items()}
