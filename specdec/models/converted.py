"""Weights in the form that a model runs in, kept in a cache so that a second start maps them and is fast.

    $SPECDEC_CACHE/converted/<key>/model.safetensors       key: identity of the checkpoint's files, scheme, format versions
                                  /source.json             which checkpoint, for `specdec cache`

A file appears by one rename, so that a killed or concurrent writer leaves either nothing or a whole one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.cache import cache_dir
from specdec.models.precision import INT4, Precision
from specdec.models.weights import Checkpoint
from specdec.quantization import int4, int8
from specdec.quantization.blocks import LAYOUT_VERSION, TILE
from specdec.quantization.rounding import round_to_four_bits

FORMAT_VERSION = 1  # of the file; a new number makes old cache files unused
LEAST_KEPT_BYTES = 8 << 20  # smaller models are converted in a fraction of a second, and would only litter the cache
_CHUNK_NUMBERS = 1 << 22  # bounds the temporaries of a large tensor; smaller chunks cost up to three times the time
_IDENTITY_BYTES = 1 << 20
_STALE_S = 60.0  # a writer takes its lock at once
_ALIGNMENT = 64  # bytes: a cache line
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


@dataclass(frozen=True)
class Conversion:
    """What to make of a checkpoint.

    Attributes:
        checkpoint: float tensors.
        path: of its file or folder.
        precision: what the model runs in.
        wanted: the tensors that fill the model, by name; `X.blocks` is made of `X.weight`.
        tied: the output projection is made of the embedding.
    """

    checkpoint: Checkpoint
    path: Path
    precision: Precision
    wanted: Mapping[str, Tensor]
    tied: bool

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.wanted.values())

    @property
    def title(self) -> str:
        return f"{self.path.name} to {self.precision.weights}"


def cached_path(conversion: Conversion) -> Path:
    """Where the converted weights lie; hashes each file's size, time, head and tail, not all of it. Raises OSError."""
    precision = conversion.precision
    scheme = f"{precision.weights}.{LAYOUT_VERSION}" if precision.quantized else str(precision.dtype)
    digest = hashlib.sha256()
    for path in sorted(set(conversion.checkpoint.files.values())):
        stat = path.stat()
        digest.update(f"{FORMAT_VERSION} {scheme} {stat.st_size} {stat.st_mtime_ns}".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_IDENTITY_BYTES))
            stream.seek(max(0, stat.st_size - _IDENTITY_BYTES))
            digest.update(stream.read())
    return cache_dir("converted", digest.hexdigest()[:32]) / "model.safetensors"


def write_converted(conversion: Conversion, target: Path, progress: Callable[[str], None]) -> None:
    """Converts straight into a safetensors file, so that no tensor is held in memory.

    Raises:
        OSError: the file cannot be written, or the disk is full.
        WeightError: a tensor holds NaN or infinite numbers.
    """
    header, places = _layout(conversion.wanted)
    _remove_stale(target.parent)
    handle, temporary = tempfile.mkstemp(prefix="writing-", dir=target.parent)
    try:
        with os.fdopen(handle, "r+b") as stream:
            _lock(handle)
            _reserve(stream.fileno(), len(header) + conversion.size_bytes)
            stream.write(header)
            stream.flush()

            def write(name: str, start: int, part: Tensor) -> None:
                row_bytes = part.nbytes // len(part)
                _write_all(stream.fileno(), part, places[name] + start * row_bytes)

            _convert(conversion, write, progress)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # it is for people; the weights are there
        _write_source(conversion, target.with_name("source.json"))


def convert_in_memory(conversion: Conversion, progress: Callable[[str], None]) -> dict[str, Tensor]:
    """The converted tensors, where they cannot be kept. Raises WeightError as `write_converted` does."""
    out = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in conversion.wanted.items()}
    _convert(conversion, lambda name, start, part: out[name][start : start + len(part)].copy_(part), progress)
    return out


def _convert(conversion: Conversion, write: Callable[[str, int, Tensor], object], progress: Callable[[str], None]) -> None:
    """Converts every tensor, in parts and several at a time: numpy and torch drop the interpreter lock in large operations.

    Args:
        write: is told a tensor's name, the first of its rows, and these.
    """

    def run(part: _Part) -> int:
        if part.kept:
            write(part.name, part.start // TILE, int4.pack(conversion.checkpoint.read_four_bit(part.source, part.start, part.stop)))
            return part.numbers
        rows = conversion.checkpoint.read(part.source, part.start, part.stop)
        if part.format == INT4:
            write(part.name, part.start // TILE, int4.pack(round_to_four_bits(rows)))
        elif part.format:
            write(part.name, part.start // TILE, int8.quantize(rows))
        else:
            write(part.name, part.start, rows.to(conversion.wanted[part.name].dtype))
        return part.numbers

    parts = sorted(_parts(conversion), key=lambda part: part.numbers, reverse=True)
    total, done, last = sum(part.numbers for part in parts), 0, time.monotonic()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for count in pool.map(run, parts):
            done += count
            if time.monotonic() - last > 1.0:
                last = time.monotonic()
                progress(f"converting {conversion.title}: {100 * done // total} %")


@dataclass(frozen=True)
class _Part:
    """Rows [start, stop) of the checkpoint's tensor `source`, for the tensor `name`; `format` of blocks, empty where it is none.

    `kept` says that the checkpoint has them in 4-bit blocks, which are taken as they are.
    """

    name: str
    source: str
    start: int
    stop: int
    numbers: int
    format: str
    kept: bool


def _parts(conversion: Conversion) -> Iterator[_Part]:
    for name in conversion.wanted:
        owner, _, leaf = name.rpartition(".")
        blocks = leaf == "blocks"
        source = f"{owner}.weight" if blocks else name
        if blocks and conversion.tied and owner == "lm_head":
            source = "model.embed_tokens.weight"
        shape = conversion.checkpoint.shape(source)
        width = math.prod(shape[1:])
        format_ = conversion.precision.format_of(owner) if blocks else ""
        kept = blocks and owner in conversion.precision.four_bit
        step = max(1, _CHUNK_NUMBERS // width // TILE) * TILE  # tiles are whole
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            yield _Part(name, source, start, stop, (stop - start) * width, format_, kept)


def _layout(wanted: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The head of a safetensors file, and where each tensor starts in the file.

    Blocks go first, side by side. The format allows no gaps: of the others, those that fill whole cache lines are next, so that
    all of these are aligned.
    """
    order = sorted(wanted, key=lambda name: (wanted[name].dtype != torch.uint8, wanted[name].nbytes % _ALIGNMENT != 0))
    entries: dict[str, dict[str, Any]] = {}  # JSON values
    offset = 0
    for name in order:
        end = offset + wanted[name].nbytes
        kind = _SAFETENSORS_NAMES[wanted[name].dtype]
        entries[name] = {"dtype": kind, "shape": list(wanted[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + entry["data_offsets"][0] for name, entry in entries.items()}


def _write_all(descriptor: int, part: Tensor, offset: int) -> None:
    data = part.contiguous().view(torch.uint8).numpy().data.cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _write_source(conversion: Conversion, path: Path) -> None:
    stat = conversion.path.stat()
    values = {
        "path": str(conversion.path.resolve()),
        "format": conversion.precision.weights,
        "size": stat.st_size,
        "mtime": stat.st_mtime,
    }
    path.write_text(json.dumps(values), "utf-8")


def _reserve(descriptor: int, size: int) -> None:
    """Takes the disk space now: better to find the disk full before a minute of work than after it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)


def _lock(descriptor: int) -> bool:
    """Takes a file for as long as it is open; False where another writer has it, or the file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_stale(folder: Path) -> None:
    """Removes what killed writers left behind: files that nobody holds, and that were not made a moment ago."""
    for path in folder.glob("writing-*"):
        try:
            with path.open("rb") as stream:
                if time.time() - path.stat().st_mtime > _STALE_S and _lock(stream.fileno()):
                    path.unlink()
        except FileNotFoundError:
            continue  # its writer finished
