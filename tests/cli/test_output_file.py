"""Where results are to be written is checked before a run, the same way by every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.cli import run

COMMANDS = (
    ["bench", "/nowhere/model.gguf", "--json"],
    ["eval", "acceptance", "/nowhere/model.gguf", "--drafter", "ngram", "--data", "/nowhere/prompts.jsonl", "--json"],
    ["eval", "perplexity", "/nowhere/model.gguf", "--text", "/nowhere/text.txt", "--json"],
    ["simulate", "--trace", "/nowhere/trace.csv", "--json"],
    ["simulate", "--trace", "/nowhere/trace.csv", "--plot"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join([*command[:2], command[-1]]) for command in COMMANDS])
def test_it_must_be_a_file_in_a_folder_that_is_there(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, words in ((tmp_path / "no" / "o.json", f"the folder {tmp_path / 'no'} does not exist"), (tmp_path, "is a directory")):
        assert run([*command, str(path)]) == 2
        shown = capsys.readouterr().err
        assert words in shown and command[-1] in shown
        assert shown.count("\n") == 1
    run([*command, str(tmp_path / "o.json")])  # fails for what else is not there
    assert list(tmp_path.iterdir()) == [], "nothing is made by looking"
