"""Where things that can be made again are kept, what lies there, and how to be rid of it.

    $SPECDEC_CACHE/kernels/cpu-<hash>.so                    compiled kernels
                  /converted/<hash>/model.safetensors       weights of a GGUF file, ready to run, with a source.json beside them
                  /costs/<hash>.json                        what steps of a model take on this machine
                  /models/*                                 the demo model, and what a user put there

Writers put a file in place by one rename. Until then it has another name, under which it stays when they are killed.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import ConfigError

DEMO_MODEL_FILE = "smollm2-135m.gguf"
KINDS = ("kernels", "converted", "costs", "models")
_PARTIAL_PREFIXES = ("writing-", "fetching-", "tmp")  # of temporaries: weights, the demo model, compiler output
_HASH_LENGTH = 32  # of the folders of converted weights


def cache_root() -> Path:
    """`$SPECDEC_CACHE`, or `~/.cache/specdec`; it may not be there yet."""
    return Path(os.environ.get("SPECDEC_CACHE") or Path("~/.cache/specdec").expanduser())


def cache_dir(*parts: str) -> Path:
    """`cache_root()` joined with `parts`, made if it is not there."""
    folder = cache_root().joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class CacheEntry:
    """One thing in the cache: a file, or a folder with all that is in it.

    Attributes:
        kind: one of KINDS.
        name: of its file or folder.
        path: where it is.
        size_bytes: all its files together, without those that are entries of their own.
        last_use_s: when it was last read or written, in seconds since the epoch; on file systems that do not keep the
            time of reading, when it was written.
        source: the file it was made from and the format, where known.
        partial: a temporary that a writer holds open, or left behind when it was killed.
        replaceable: specdec makes or fetches it again by itself when it is missed.
    """

    kind: str
    name: str
    path: Path
    size_bytes: int
    last_use_s: float
    source: str = ""
    partial: bool = False
    replaceable: bool = True


def list_cache() -> list[CacheEntry]:
    """All that specdec keeps there, by kind, last used first; neither files that are not its own, nor links, which lead elsewhere."""
    entries = [entry for kind in KINDS for entry in _entries(kind)]
    return sorted(entries, key=lambda entry: (KINDS.index(entry.kind), -entry.last_use_s))


def select_entries(entries: Sequence[CacheEntry], words: Sequence[str]) -> list[CacheEntry]:
    """The entries whose kind or name is among `words`; without words, all that are replaceable.

    Raises:
        ConfigError: a word names nothing.
    """
    known = (*KINDS, *(entry.name for entry in entries))
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ", see `specdec cache`"
            raise ConfigError(f"{word!r} is neither a kind ({', '.join(KINDS)}) nor the name of anything in the cache{hint}")
    return [entry for entry in entries if (entry.kind in words or entry.name in words if words else entry.replaceable)]


def remove_entry(entry: CacheEntry) -> int:
    """Removes an entry from the disk and returns the bytes that this freed. One that has gone already frees none.

    Raises:
        ConfigError: it cannot be removed.
    """
    try:
        freed = sum(item.stat().st_size for item in _files(entry.path))
        if entry.path.is_dir():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ConfigError(f"cannot remove {entry.path}: {error.strerror or error}") from error
    return freed


def _entries(kind: str) -> Iterator[CacheEntry]:
    folder = cache_root() / kind
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if path.is_symlink():
            continue
        try:
            if kind == "converted":
                yield from _converted(path)
            elif path.name.startswith(_PARTIAL_PREFIXES):
                yield _entry(kind, path, partial=True)
            elif path.is_file():
                yield _entry(kind, path, replaceable=kind != "models" or path.name == DEMO_MODEL_FILE)
        except FileNotFoundError:
            continue  # somebody else removed it, or its writer put it in place


def _converted(folder: Path) -> Iterator[CacheEntry]:
    """The converted weights in one folder, as one entry, and each temporary as one of its own."""
    if not folder.is_dir() or len(folder.name) != _HASH_LENGTH:
        return
    partials = [path for path in folder.glob("writing-*") if not path.is_symlink()]
    for path in partials:
        yield _entry("converted", path, partial=True)
    if len(list(folder.iterdir())) > len(partials) or not partials:
        yield _entry("converted", folder, without=partials, source=_read_source(folder / "source.json"))


def _entry(
    kind: str, path: Path, *, without: Sequence[Path] = (), source: str = "", partial: bool = False, replaceable: bool = True
) -> CacheEntry:
    stats = [item.stat() for item in _files(path) if item not in without]
    last_use = max(max(stat.st_atime, stat.st_mtime) for stat in stats or [path.stat()])
    return CacheEntry(kind, path.name, path, sum(stat.st_size for stat in stats), last_use, source, partial, replaceable)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file() and not item.is_symlink()]


def _read_source(path: Path) -> str:
    """`file (format)`, and what has become of the file since; empty where it is not known."""
    try:
        values = json.loads(path.read_text("utf-8"))
        source, label = Path(values["path"]), f"{values['path']} ({values['format']})"
        size, mtime = values["size"], values["mtime"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    try:
        stat = source.stat()
    except OSError:
        return f"{label}, gone"
    changed = stat.st_size != size or abs(stat.st_mtime - mtime) >= 1.0
    return f"{label}, changed since" if changed else label
