"""Perplexity against closed forms, however the text is cut, and the command around it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specdec.cli import run
from specdec.errors import ConfigError
from specdec.eval import perplexity
from specdec.eval.perplexity import PerplexityResult, read_text, run_perplexity
from specdec.testing import write_const_checkpoint, write_tiny_checkpoint
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer

TEXT = "".join(chr(32 + 7 * index % 90) for index in range(400))
LOGITS = np.random.default_rng(0).normal(size=512).astype(np.float32)


@pytest.fixture
def constant(tmp_path: Path) -> Path:
    """A model that gives `LOGITS` after every token."""
    folder = write_const_checkpoint(tmp_path / "constant", LOGITS.tolist())
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write_file(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, "utf-8")
        return tmp_path / name

    return write_file


def _score(folder: Path, context: int, dtype: str = "float32") -> PerplexityResult:
    (result,) = run_perplexity(str(folder), [dtype], [TEXT], context, lambda text: None, lambda text: None)
    return result


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("int8", 2e-2)])
def test_a_model_with_constant_logits_has_the_perplexity_that_these_say(constant: Path, dtype: str, error: float) -> None:
    ids = tiny_tokenizer().encode(TEXT, add_special_tokens=False)
    scored = [token for at in range(0, len(ids), 50) for token in ids[at + 1 : at + 50]]
    expected = np.log(np.exp(LOGITS.astype(np.float64)).sum()) - LOGITS[scored].mean()
    result = _score(constant, 50, dtype)
    assert result.tokens == len(scored) and result.weights == dtype
    assert result.loss == pytest.approx(expected, abs=error)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=2 * error)


def test_how_many_tokens_are_forwarded_at_once_changes_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = _score(tiny, 100)
    monkeypatch.setattr(perplexity, "_STEP", 7)
    assert _score(tiny, 100).loss == pytest.approx(at_once.loss, abs=1e-6)
    assert _score(tiny, 60).loss != pytest.approx(at_once.loss, abs=1e-6)  # other chunks, other contexts


def test_a_context_beyond_the_model_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="at most 256, the model's limit, got 257"):
        _score(tiny, 257)


def test_files_share_the_bytes(write: Callable[[str, str], Path]) -> None:
    text = write("a.txt", "x" * 99 + "é" * 50)
    rows = [{"turns": ["one", "two"]}, {"prompt": "three", "completion": "four" * 30}]
    data = write("b.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_text([text], [data], 200) == ["x" * 99, ("one\n\ntwo\n\nthree\n\n" + "four" * 30)[:100]]  # no half character


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.jsonl", '{"turns": ["a"]}', "holds 1 bytes of text, 100 are wanted"),
        ("other.jsonl", '{"turns": ["a"]}\n{"text": "a"}', r"other\.jsonl:2: a row is"),
        ("broken.jsonl", "{", r"broken\.jsonl:1: a row is"),
    ],
)
def test_files_that_cannot_be_used_are_named(write: Callable[[str, str], Path], name: str, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_text([], [write(name, content)], 100)
    with pytest.raises(ConfigError, match=r"cannot read .*none\.txt"):
        read_text([Path("none.txt")], [], 100)


def test_the_command_prints_a_table_and_writes_json(
    tiny: Path, write: Callable[[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = write("a.txt", TEXT), tmp_path / "out.json"
    options = ["--dtype", "int8", "--dtype", "float32", "--bytes", "300", "--context", "64"]
    assert run(["eval", "perplexity", str(tiny), "--text", str(text), "--json", str(output), *options]) == 0
    report = json.loads(output.read_text("utf-8"))
    assert [result["weights"] for result in report["results"]] == ["int8", "float32"]
    assert report["results"][1]["change_percent"] == 0 != report["results"][0]["change_percent"]
    assert report["files"] == ["a.txt"] and report["bytes"] == 300 and report["context"] == 64
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["weights", "perplexity", "change", "tokens", "tokens/s"]
    assert [line.split()[0] for line in lines[1:]] == ["int8", "float32"]


def test_the_command_wants_text(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "perplexity", str(tiny)]) == 2
    assert "give --text or --data" in capsys.readouterr().err
