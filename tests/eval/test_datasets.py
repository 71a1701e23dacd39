"""Prompt files: what is read, and that a bad row is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ConfigError
from specdec.eval.datasets import PromptRow, load_prompts

GOOD: dict[str, Any] = {"id": "a", "category": "c", "turns": ["one", "two"]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_rows_and_limit_per_file(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", GOOD, "\n", {**GOOD, "id": "b", "kind": "completion", "prediction": "p", "answer": 3}, GOOD)
    second = write(tmp_path / "b.jsonl", {**GOOD, "id": "z"})
    rows = load_prompts([first, second], limit=2)
    assert rows == [
        PromptRow("a", "c", ("one", "two")),
        PromptRow("b", "c", ("one", "two"), raw=True, prediction="p"),
        PromptRow("z", "c", ("one", "two")),
    ]
    assert len(load_prompts([first])) == 3


@pytest.mark.parametrize(
    "row",
    [
        "not json\n",
        [1],
        {"id": "a", "category": "c"},
        {**GOOD, "turns": []},
        {**GOOD, "turns": [""]},
        {**GOOD, "turns": "one"},
        {**GOOD, "turns": [3]},
        {**GOOD, "id": 3},
        {"id": "a", "turns": ["x"]},
    ],
)
def test_bad_row_is_named_with_its_line(tmp_path: Path, row: Any) -> None:
    path = write(tmp_path / "bad.jsonl", GOOD, row)
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2: "):
        load_prompts([path])


def test_unreadable_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        load_prompts([tmp_path / "none.jsonl"])
    with pytest.raises(ConfigError, match="no prompts in"):
        load_prompts([write(tmp_path / "empty.jsonl", "\n")])
