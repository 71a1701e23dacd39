"""Prompt files: JSON lines of `{"id", "category", "turns": [...]}`. Reads and checks them; runs nothing.

Optional fields of a row: `"kind": "completion"` keeps the chat template off, `"prediction"` is predicted output for the
drafter `prediction`. Any other field is the file's own business.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.llm import LLM


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompt file.

    Attributes:
        id: unique within the file.
        category: results are pooled by it.
        turns: the user's messages, at least one.
        raw: the turns are text to continue, not messages.
        prediction: predicted output, empty where the row has none.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    raw: bool = False
    prediction: str = ""


def load_prompts(paths: Sequence[Path], limit: int | None = None) -> list[PromptRow]:
    """Reads prompt files, the first `limit` rows of each.

    Raises:
        ConfigError: a file cannot be read or a row is not of the form above; it names the file and the line.
    """
    rows: list[PromptRow] = []
    for path in paths:
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the prompt file {path}: {error}") from None
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
        rows += [_parse_row(line, f"{path}:{number}") for number, line in numbered]
    if not rows:
        raise ConfigError(f"no prompts in {', '.join(map(str, paths))}")
    return rows


def spread_prompts(llm: LLM, path: Path, limit: int, longest: int) -> list[list[int]]:
    """Token ids of the first turns of `limit` rows from all over a file, those of more than `longest` tokens left out.

    Raises:
        ConfigError: as `load_prompts` does.
    """
    encoded = [llm.chat_ids([{"role": "user", "content": row.turns[0]}]) for row in load_prompts([path])]
    fitting = [ids for ids in encoded if len(ids) <= longest]
    step = max(1, len(fitting) / limit)
    return [fitting[int(place * step)] for place in range(min(limit, len(fitting)))]


def _parse_row(line: str, where: str) -> PromptRow:
    try:
        values: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    wanted = 'a row is {"id": text, "category": text, "turns": [text, ...]}'
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {wanted}, got {type(values).__name__}")
    turns = values.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f"{where}: {wanted}; turns is {turns!r}"[:300])
    for name in ("id", "category"):
        if not isinstance(values.get(name), str):
            raise ConfigError(f"{where}: {wanted}; {name} is {values.get(name)!r}"[:300])
    return PromptRow(
        values["id"], values["category"], tuple(turns), values.get("kind") == "completion", str(values.get("prediction") or "")
    )
