"""GGUF weights, dequantised into the decoder's names and layout, and kept in a cache so that a second start is fast.

    $SPECDEC_CACHE/converted/<key>/model.safetensors       key: file identity, dtype, format version

The cache file appears by one rename, so that a killed or concurrent writer leaves either nothing or a whole file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.cache import cache_dir
from specdec.errors import WeightError
from specdec.models.config import ModelConfig
from specdec.models.gguf_file import GgufFile, GgufTensor

FORMAT_VERSION = 1  # of the converted layout; a new number makes old cache files unused
QUANT_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_CHUNK_NUMBERS = 1 << 22  # bounds the temporaries of a large tensor; smaller chunks cost up to three times the time
_IDENTITY_BYTES = 1 << 20
_STALE_S = 24 * 3600.0
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IGNORED = ("rope_freqs.weight",)  # read with the config


@dataclass(frozen=True)
class _Source:
    """Where one parameter comes from: a tensor, the order of its rows, and what to subtract."""

    tensor: GgufTensor
    order: NDArray[np.int64] | None
    offset: float


def converted_weights(
    file: GgufFile, config: ModelConfig, dtype: torch.dtype, progress: Callable[[str], None]
) -> tuple[Path | None, dict[str, Tensor]]:
    """The weights of a GGUF file under the decoder's parameter names.

    Returns:
        the cache file, written now unless it was there; or, where the cache cannot be written, None and the tensors.

    Raises:
        WeightError: a tensor is not known, of a quantisation type that is not supported, or not finite.
    """
    sources = _sources(file, config)
    size = sum(int(np.prod(source.tensor.shape)) for source in sources.values()) * dtype.itemsize
    try:
        target = cached_path(file.path, dtype)
        if not target.exists():
            progress(f"converting {file.path.name} to {str(dtype).removeprefix('torch.')} ({size / 1e9:.1f} GB, once)")
            _write_cache(file, sources, dtype, target, progress)
    except OSError as error:
        progress(f"the converted weights cannot be kept ({error}); set SPECDEC_CACHE to a folder with {size / 1e9:.1f} GB to start faster")
        tensors = {name: torch.empty(source.tensor.shape, dtype=dtype) for name, source in sources.items()}
        _fill(file, sources, tensors, progress)
        return None, tensors
    return target, {}


def cached_path(path: Path, dtype: torch.dtype) -> Path:
    """Where the converted weights of a GGUF file lie; hashes its size, time, head and tail, not all of it."""
    stat = path.stat()
    digest = hashlib.sha256(f"{FORMAT_VERSION} {dtype} {stat.st_size} {stat.st_mtime_ns}".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_IDENTITY_BYTES))
        stream.seek(max(0, stat.st_size - _IDENTITY_BYTES))
        digest.update(stream.read())
    return cache_dir("converted", digest.hexdigest()[:32]) / "model.safetensors"


def parameter_shapes(file: GgufFile, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the converted weights of a GGUF file have."""
    return {name: source.tensor.shape for name, source in _sources(file, config).items()}


def _sources(file: GgufFile, config: ModelConfig) -> dict[str, _Source]:
    sources = {}
    for name, tensor in file.tensors.items():
        if name in _IGNORED:
            continue
        if tensor.kind not in QUANT_TYPES:
            raise WeightError(f"{file.path}: tensor {name} is {tensor.kind}, which cannot be read; supported: {', '.join(QUANT_TYPES)}")
        target = _parameter_name(name, file)
        # Gemma's weight - 1 is stored as the weight itself
        offset = config.norm_offset if target.endswith("norm.weight") else 0.0
        sources[target] = _Source(tensor, _row_order(target, file.architecture, config), offset)
    return sources


def _parameter_name(name: str, file: GgufFile) -> str:
    names = _LAYER_NAMES | (_GEMMA_NAMES if file.architecture == "gemma3" else {})
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    layer, part, leaf = match.groups() if match else (None, "", "")
    found = _TOP_NAMES.get(part) if layer is None else names.get(part)
    if found is None:
        raise WeightError(f"{file.path}: tensor {name} has no place in architecture {file.architecture!r}")
    return f"{found}.{leaf}" if layer is None else f"model.layers.{layer}.{found}.{leaf}"


def _row_order(name: str, architecture: str, config: ModelConfig) -> NDArray[np.int64] | None:
    """Row order that undoes the permutation of q and k in llama files, which pair neighbours where checkpoints pair halves:

    file        0a 0b 1a 1b 2a 2b ...      per head
    checkpoint  0a 1a 2a ... 0b 1b 2b ...
    """
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None or architecture not in ("llama", "mistral"):
        return None
    rows = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _fill(file: GgufFile, sources: Mapping[str, _Source], out: Mapping[str, Tensor], progress: Callable[[str], None]) -> None:
    """Dequantises every source into its tensor, several at a time: numpy drops the interpreter lock in large operations."""
    total, done, last = sum(t.numel() for t in out.values()), 0, time.monotonic()
    largest_first = sorted(sources, key=lambda name: -out[name].numel())
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for name, _ in zip(largest_first, pool.map(lambda n: _dequantise(file, sources[n], out[n]), largest_first), strict=True):
            done += out[name].numel()
            if time.monotonic() - last > 1.0:
                last = time.monotonic()
                progress(f"converting {file.path.name}: {100 * done // total} %")


def _dequantise(file: GgufFile, source: _Source, out: Tensor) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    tensor, kind = source.tensor, GGMLQuantizationType[source.tensor.kind]
    raw = file.rows(tensor)
    numbers = out.view(-1, out.shape[-1]) if source.order is None or out.dim() > 1 else out.view(-1, 1)
    if source.order is not None:
        raw = raw.reshape(len(source.order), -1)[source.order]  # of a bias, single numbers
    step = max(1, _CHUNK_NUMBERS // numbers.shape[1])
    for start in range(0, len(raw), step):
        chunk = raw[start : start + step]
        values = chunk.view(np.float32) if kind == GGMLQuantizationType.F32 else dequantize(chunk, kind)
        if not np.isfinite(values.sum(dtype=np.float64)):
            raise WeightError(f"{file.path}: tensor {tensor.name} holds NaN or infinite numbers")
        if source.offset:
            values = values - np.float32(source.offset)
        # a copy, since the file is mapped read-only and torch wants writable memory
        numbers[start : start + step].copy_(torch.from_numpy(values if values.flags.writeable else values.copy()))


def _write_cache(file: GgufFile, sources: Mapping[str, _Source], dtype: torch.dtype, target: Path, progress: Callable[[str], None]) -> None:
    """Dequantises straight into a mapped safetensors file, so that no tensor is held in memory."""
    entries: dict[str, dict[str, Any]] = {}  # a safetensors header, JSON values
    offset = 0
    for name, source in sources.items():
        end = offset + int(np.prod(source.tensor.shape)) * dtype.itemsize
        entries[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": list(source.tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-(8 + len(header)) % 64)  # data starts on a cache line
    _remove_stale(target.parent)
    handle, temporary = tempfile.mkstemp(prefix="writing-", dir=target.parent)
    try:
        with os.fdopen(handle, "r+b") as stream:
            _reserve(stream.fileno(), 8 + len(header) + offset)
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.flush()
            data = np.memmap(stream, dtype=np.uint8, mode="r+", offset=0)
            base = 8 + len(header)
            out = {
                name: torch.from_numpy(data[base + entry["data_offsets"][0] : base + entry["data_offsets"][1]])
                .view(dtype)
                .view(*sources[name].tensor.shape)
                for name, entry in entries.items()
            }
            _fill(file, sources, out, progress)
            data.flush()
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _reserve(descriptor: int, size: int) -> None:
    """Takes the disk space now: writing to a mapping of a full disk would kill the process instead of raising OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)


def _remove_stale(folder: Path) -> None:
    """Removes what killed writers left behind."""
    for path in folder.glob("writing-*"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()
        except FileNotFoundError:
            continue  # its writer finished
