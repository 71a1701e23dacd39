"""The grammar of drafter specs, the same in the CLI, Python and HTTP. No drafter is imported here.

    spec    := part ("+" part)*                 several drafters whose trees are merged, the first has precedence
    part    := name [":" target] ["(" option ("," option)* ")"]
    option  := name "=" value                   integers, numbers, true, false, or text

Examples: `off`, `ngram`, `ngram(min=2,max=5)`, `model:/models/draft.gguf(depth=6)`, `ngram+model:PATH`,
`my_package.drafters:MyDrafter`. A name with a dot or without a built-in of that name is a Python module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specdec.errors import ConfigError

Option = int | float | bool | str

_PART = re.compile(r"(?P<name>[A-Za-z_][\w.\-]*)(?::(?P<target>[^()]+))?(?:\((?P<options>[^()]*)\))?", re.ASCII)


@dataclass(frozen=True)
class DrafterSpec:
    """One part of a spec: `name:target(options)`."""

    name: str
    target: str | None = None
    options: tuple[tuple[str, Option], ...] = ()

    def __str__(self) -> str:
        target = f":{self.target}" if self.target else ""
        options = f"({','.join(f'{k}={_show(v)}' for k, v in self.options)})" if self.options else ""
        return f"{self.name}{target}{options}"


def parse_drafter_spec(text: str) -> tuple[DrafterSpec, ...]:
    """Parses a spec string into its parts; `off` gives the empty tuple.

    Raises:
        ConfigError: the text is not a spec, an option is given twice, or `off` is combined with others.
    """
    parts = tuple(_parse_part(part, text) for part in _split_parts(text))
    if any(part.name == "off" for part in parts):
        if len(parts) > 1 or parts[0].target or parts[0].options:
            raise ConfigError(f"drafter: 'off' stands alone, got {text!r}")
        return ()
    return parts


def _split_parts(text: str) -> list[str]:
    """Splits at `+` outside parentheses."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _parse_part(part: str, whole: str) -> DrafterSpec:
    match = _PART.fullmatch(part)
    if match is None:
        raise ConfigError(f"drafter: expected NAME[:TARGET][(OPTION=VALUE,...)], joined by '+', got {part!r} in {whole!r}")
    options: dict[str, Option] = {}
    for item in filter(None, (piece.strip() for piece in (match["options"] or "").split(","))):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not key or not value:
            raise ConfigError(f"drafter: expected OPTION=VALUE, got {item!r} in {whole!r}")
        if key in options:
            raise ConfigError(f"drafter: option {key!r} is given twice in {whole!r}")
        options[key] = _parse_value(value)
    return DrafterSpec(match["name"], match["target"], tuple(sorted(options.items())))


def _parse_value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _show(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
