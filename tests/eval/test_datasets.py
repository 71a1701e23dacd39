"""Prompt files: what is read, and that a bad row is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ConfigError
from specdec.eval.datasets import PromptRow, load_prompts, spread_prompts

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


class _Words:
    """Encodes a text as one id per word."""

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        return [int(word) for word in messages[0]["content"].split()]


def test_prompts_are_spread_over_the_file_and_long_ones_left_out(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = [str(number) if number % 2 else "9 9 9 9" for number in range(12)]
    path.write_text("\n".join(f'{{"id": "{number}", "category": "c", "turns": ["{text}"]}}' for number, text in enumerate(texts)))
    assert spread_prompts(_Words(), path, 3, longest=3) == [[1], [5], [9]]  # type: ignore[arg-type]  # the only method used
    assert spread_prompts(_Words(), path, 99, longest=4) == [[int(word) for word in text.split()] for text in texts]  # type: ignore[arg-type]  # the same
