"""Reads GGUF files: metadata and where each tensor lies. Dequantising is in gguf_weights.py.

The reader of the `gguf` package takes 2 to 10 s for vocabularies of 50k to 260k tokens, because it makes an array of every string;
this one takes a tenth, and says where a file is cut short.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.errors import ModelError, WeightError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place in the file.

    Attributes:
        name: llama.cpp's name, such as `blk.0.attn_q.weight`.
        shape: as torch has it: rows first (GGUF writes it reversed).
        kind: quantisation type, such as `Q4_K`.
        offset: of its first byte in the file.
        row_bytes: bytes of one row, the last dimension.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64))


@dataclass(frozen=True)
class GgufFile:
    """A mapped GGUF file.

    Attributes:
        metadata: key to value; arrays are lists.
        tensors: by llama.cpp's name.
        data: uint8 [bytes], the whole file.
    """

    path: Path
    metadata: Mapping[str, Any]  # scalars, strings and lists of them
    tensors: Mapping[str, GgufTensor]
    data: NDArray[np.uint8]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The raw bytes of a tensor, uint8 [rows, row_bytes]; a view of the file."""
        size = tensor.num_rows * tensor.row_bytes
        return self.data[tensor.offset : tensor.offset + size].reshape(tensor.num_rows, tensor.row_bytes)

    def release(self) -> None:
        """Lets go of the pages read so far, which count as this process's memory; they are read again where they are needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]  # np.memmap's own mmap


def read_gguf(path: Path) -> GgufFile:
    """Maps a GGUF file. Raises ModelError when it is none, and WeightError when it is cut short."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: empty
        raise ModelError(f"{path}: cannot be read: {error}") from error
    cursor = _Cursor(data._mmap, path)  # type: ignore[attr-defined]  # np.memmap's own mmap: plain slices of it are fast
    if cursor.take(4) != MAGIC:
        raise ModelError(f"{path}: not a GGUF file (it does not start with {MAGIC.decode()!r})")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version must be 2 or 3, little-endian, got {version}")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    align = int(metadata.get("general.alignment", 32))
    start = -(-cursor.position // align) * align
    tensors = {name: _place(path, name, dims, kind, start + offset, len(data)) for name, dims, kind, offset in infos}
    return GgufFile(path, metadata, tensors, data)


def _tensor_info(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    name = cursor.string()
    dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    return name, dims, cursor.scalar("I"), cursor.scalar("Q")


def _place(path: Path, name: str, dims: list[int], kind: int, offset: int, file_size: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        quant = GGMLQuantizationType(kind)
    except ValueError:
        raise WeightError(f"{path}: tensor {name} has quantisation type number {kind}, which is not known") from None
    block, block_bytes = GGML_QUANT_SIZES[quant]
    if not dims or dims[0] % block:
        raise WeightError(f"{path}: tensor {name} has rows of {dims[:1]} numbers, which {quant.name} blocks of {block} do not divide")
    tensor = GgufTensor(name, tuple(reversed(dims)), quant.name, offset, dims[0] // block * block_bytes)
    end = offset + tensor.num_rows * tensor.row_bytes
    if end > file_size:
        raise WeightError(f"{path}: cut short: tensor {name} ends at byte {end}, the file at {file_size}; fetch it again")
    return tensor


class _Cursor:
    """Reads values one after another."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.position = 0
        self.size = len(buffer)
        self._unpack: dict[str, tuple[Callable[..., tuple[Any, ...]], int]] = {
            code: (struct.Struct("<" + code).unpack_from, struct.calcsize("<" + code)) for code in _SCALARS.values()
        }

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self.size:
            raise WeightError(f"{self.path}: cut short inside its header at byte {self.size}; fetch it again")
        piece = self.buffer[self.position : end]
        self.position = end
        return piece

    def scalar(self, code: str) -> Any:  # int, float or bool, as the code says
        unpack, size = self._unpack[code]
        if self.position + size > self.size:
            self.take(size)
        value = unpack(self.buffer, self.position)[0]
        self.position += size
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:  # a scalar, a string or a list of either
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: metadata value of unknown type {kind} at byte {self.position}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
        return [self.value(item) for _ in range(count)]
