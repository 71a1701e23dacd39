"""Checks the options of a drafter spec against the signature of what will build the drafter. Builds nothing."""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec.drafter_spec import DrafterSpec, Option
from specdec.errors import ConfigError

_SIMPLE = (bool, int, float, str)


@dataclass(frozen=True)
class Signature:
    """What a factory takes.

    Attributes:
        context: it wants the DrafterContext, as its parameter `context`.
        target: it has a parameter `target`, the text after the colon; `required` if that has no default.
        options: name -> allowed types, empty where anything goes.
        required: names that have no default.
        open: it takes any option (`**kwargs`).
    """

    context: bool
    target: bool
    options: Mapping[str, tuple[type, ...]]
    required: frozenset[str]
    open: bool


def read_signature(factory: Callable[..., Any], skip: int = 0) -> Signature:
    """Reads what `factory` takes, but for its first `skip` parameters, which are given in any case."""
    signature = inspect.signature(factory)
    hints = _hints(factory)
    options: dict[str, tuple[type, ...]] = {}
    required = set()
    names = list(signature.parameters.values())[skip:]
    for parameter in names:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            required.add(parameter.name)
        if parameter.name not in ("context", "target"):
            options[parameter.name] = _simple_types(hints.get(parameter.name, parameter.annotation))
    known = {parameter.name for parameter in names}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names)
    return Signature("context" in known, "target" in known, options, frozenset(required - {"context"}), takes_any)


def check_options(part: DrafterSpec, signature: Signature, *, target: str | None) -> dict[str, Option]:
    """The keyword arguments that `part` asks for. Raises ConfigError that names the option and what is allowed."""
    values: dict[str, Option] = {}
    for name, value in part.options:
        if name not in signature.options and not signature.open:
            allowed = ", ".join(sorted(signature.options)) or "none"
            near = difflib.get_close_matches(name, signature.options, 1)
            hint = f", did you mean {near[0]!r}?" if near else ";"
            raise ConfigError(f"drafter {part.name!r}: unknown option {name!r}{hint} allowed: {allowed}")
        values[name] = _checked(part.name, name, value, signature.options.get(name, ()))
    if target is not None:
        if not signature.target:
            raise ConfigError(f"drafter {part.name!r} takes no target, got {part.name}:{target}; write {part.name!r} alone")
        values["target"] = target
    missing = sorted(signature.required - set(values))
    if missing == ["target"]:
        raise ConfigError(f"drafter {part.name!r} needs a target: {part.name}:TARGET, such as {part.name}:/models/draft")
    if missing:
        raise ConfigError(f"drafter {part.name!r}: option {missing[0]!r} has no default: {part.name}({missing[0]}=...)")
    return values


def _checked(drafter: str, name: str, value: Option, allowed: tuple[type, ...]) -> Option:
    if not allowed or type(value) in allowed:
        return value
    if float in allowed and type(value) is int:
        return float(value)
    if str in allowed:
        return str(value)
    wanted = " or ".join(kind.__name__ for kind in allowed)
    raise ConfigError(f"drafter {drafter!r}: option {name!r} must be {wanted}, got {value!r}")


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Evaluated annotations; empty where a module hides its types from run time."""
    function = factory.__init__ if inspect.isclass(factory) else factory
    try:
        return typing.get_type_hints(function)
    except (NameError, AttributeError, TypeError):
        return {}


def _simple_types(annotation: Any) -> tuple[type, ...]:
    """The option types that an annotation allows; empty if it says nothing that can be checked."""
    if isinstance(annotation, str):
        return tuple(kind for kind in _SIMPLE if kind.__name__ == annotation)
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    members = typing.get_args(annotation) if is_union else (annotation,)
    simple = tuple(kind for kind in _SIMPLE if kind in members)
    others = [member for member in members if member not in simple and member is not type(None)]
    return () if others else simple
