"""`specdec cache`: what it lists, what it removes, and what it never touches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cache import CacheEntry, list_cache, remove_entry
from specdec.cli import run

HASH = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one thing of every sort, and files that are not the cache's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECDEC_CACHE", str(folder))
    source = tmp_path / "some.gguf"
    source.write_bytes(b"x" * 10)
    write(folder / "kernels" / "cpu-1.so", 1000)
    write(folder / "kernels" / "tmpabc" / "attention.o", 300)
    write(folder / "converted" / HASH / "model.safetensors", 5000)
    write(folder / "converted" / HASH / "writing-x", 700)
    values = {"path": str(source), "format": "int8", "size": 10, "mtime": source.stat().st_mtime}
    (folder / "converted" / HASH / "source.json").write_text(json.dumps(values))
    write(folder / "models" / "smollm2-135m.gguf", 2000)
    write(folder / "models" / "mine.gguf", 4000)
    write(folder / "models" / "fetching-y" / "wheel.whl", 50)
    write(folder / "notes.txt", 1)
    write(folder / "converted" / "not-a-hash" / "thing", 1)
    outside = write(tmp_path / "outside" / "precious.bin", 9)
    (folder / "models" / "link.gguf").symlink_to(outside)
    (folder / "converted" / ("f" * 32)).symlink_to(outside.parent)
    return folder


def write(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0" * size)
    return path


def found() -> dict[str, CacheEntry]:
    return {entry.name: entry for entry in list_cache()}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_entries(root: Path) -> None:
    entries = found()
    assert set(entries) == {"cpu-1.so", "tmpabc", HASH, "writing-x", "smollm2-135m.gguf", "mine.gguf", "fetching-y"}
    assert {name for name, entry in entries.items() if entry.partial} == {"tmpabc", "writing-x", "fetching-y"}
    assert [name for name, entry in entries.items() if not entry.replaceable] == ["mine.gguf"]
    assert entries["cpu-1.so"].size_bytes == 1000
    assert entries["tmpabc"].size_bytes == 300
    own = (root / "converted" / HASH / "source.json").stat().st_size
    assert entries[HASH].size_bytes == 5000 + own


def test_temporaries_of_converted_weights_are_counted_once(root: Path) -> None:
    on_disk = sum(
        path.stat().st_size
        for kind in ("kernels", "models")
        for path in (root / kind).rglob("*")
        if not path.is_symlink() and path.is_file()
    )
    on_disk += sum(path.stat().st_size for path in (root / "converted" / HASH).iterdir())
    assert sum(entry.size_bytes for entry in list_cache()) == on_disk


def test_a_folder_with_nothing_but_a_temporary_is_that_temporary(root: Path) -> None:
    write(root / "converted" / ("a" * 32) / "writing-z", 80)
    entry = found()["writing-z"]
    assert (entry.partial, entry.size_bytes) == (True, 80)
    assert "a" * 32 not in found()


def test_last_use_is_the_last_read_or_write(root: Path) -> None:
    os.utime(root / "kernels" / "cpu-1.so", (2e9, 1e9))
    os.utime(root / "models" / "mine.gguf", (1e9, 1.5e9))
    assert found()["cpu-1.so"].last_use_s == 2e9
    assert found()["mine.gguf"].last_use_s == 1.5e9


def test_source_is_told_with_its_fate(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "some.gguf"
    assert found()[HASH].source == f"{source} (int8)"
    source.write_bytes(b"x" * 11)
    assert found()[HASH].source == f"{source} (int8), changed since"
    source.unlink()
    assert found()[HASH].source == f"{source} (int8), gone"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"path": 3}', '{"path": "x", "format": "int8", "size": "big", "mtime": null}'])
def test_a_source_that_cannot_be_read_is_unknown(root: Path, content: str | None) -> None:
    path = root / "converted" / HASH / "source.json"
    path.unlink() if content is None else path.write_text(content)
    assert found()[HASH].source in ("", "x (int8), gone")


def test_listing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{root}: ")
    assert "some.gguf (int8)" in out
    assert "unfinished" in out
    assert "1.0 kB" in out
    assert "models     all 3" in out
    assert "precious" not in out
    assert "notes.txt" not in out


def test_nothing_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "none"))
    assert run(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'none'}: 0 B\n"
    assert run(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    assert not (tmp_path / "none").exists()


def test_clear_keeps_what_cannot_be_made_again_and_what_is_not_its_own(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    freed = sum(entry.size_bytes for entry in list_cache() if entry.name != "mine.gguf")
    assert run(["cache", "clear", "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"freed {freed / 1000:.1f} kB" in out
    assert "kept 1 entry (4.0 kB)" in out
    assert files(root) == {"models/mine.gguf", "models/link.gguf", "notes.txt", "converted/not-a-hash/thing"}
    assert (tmp_path / "outside" / "precious.bin").is_file()


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (["kernels"], {"kernels/cpu-1.so", "kernels/tmpabc/attention.o"}),
        (["models"], {"models/smollm2-135m.gguf", "models/mine.gguf", "models/fetching-y/wheel.whl"}),
        (["mine.gguf", "cpu-1.so"], {"models/mine.gguf", "kernels/cpu-1.so"}),
        (["writing-x"], {f"converted/{HASH}/writing-x"}),
        ([HASH], {f"converted/{HASH}/{name}" for name in ("model.safetensors", "writing-x", "source.json")}),
    ],
)
def test_clear_what_is_named(root: Path, words: list[str], gone: set[str]) -> None:
    before = files(root)
    assert run(["cache", "clear", "--yes", *words]) == 0
    assert before - files(root) == gone


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_clear_asks(root: Path, answer: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import io

    before = files(root)
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert run(["cache", "clear", "cpu-1.so"]) == status
    assert "Remove 1 entry (1.0 kB)" in capsys.readouterr().out
    assert before - files(root) == ({"kernels/cpu-1.so"} if status == 0 else set())


def test_unknown_words_are_refused_before_anything_is_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(root)
    assert run(["cache", "clear", "--yes", "kernels", "mine.gguff"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean 'mine.gguf'?" in error
    assert files(root) == before


def test_what_went_meanwhile_frees_nothing(root: Path) -> None:
    entry = found()["cpu-1.so"]
    assert remove_entry(entry) == 1000
    assert remove_entry(entry) == 0


def test_torch_is_not_imported(root: Path) -> None:
    code = "import sys\nfrom specdec.cli import run\nrun(['cache'])\nrun(['cache', 'clear', '--yes'])\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=60).returncode == 0
