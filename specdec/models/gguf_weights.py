"""GGUF weights as a checkpoint: dequantised on reading, under the decoder's names and in its layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import WeightError
from specdec.models.config import ModelConfig
from specdec.models.gguf_file import GgufFile, GgufTensor
from specdec.quantization import int4

QUANT_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

_EMBEDDING = "model.embed_tokens"
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


class GgufWeights:
    """The weights of a GGUF file; a `specdec.models.weights.Checkpoint`.

    Raises:
        WeightError: a tensor is not known, or of a quantisation type that is not supported.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._sources = _sources(file, config)
        self._tied = config.tie_word_embeddings
        self.files: Mapping[str, Path] = dict.fromkeys(self._sources, file.path)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].tensor.shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """float32 rows [start, stop). Raises WeightError where one holds NaN or infinite numbers."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        source = self._sources[name]
        raw = self._file.rows(source.tensor)
        vector = len(source.tensor.shape) == 1
        if vector:  # its numbers are one row
            values = dequantize(raw, GGMLQuantizationType[source.tensor.kind]).reshape(-1)
            values = (values if source.order is None else values[source.order])[start:stop]
        else:
            rows = raw[start:stop] if source.order is None else raw[source.order[start:stop]]
            values = dequantize(rows, GGMLQuantizationType[source.tensor.kind])
        if not np.isfinite(values.sum(dtype=np.float64)):
            raise WeightError(f"{self._file.path}: tensor {source.tensor.name} holds NaN or infinite numbers")
        if source.offset:
            values = values - np.float32(source.offset)
        # a copy, since the file is mapped read-only and torch wants writable memory
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def four_bit_layers(self) -> frozenset[str]:
        """Linear layers whose weights are 4-bit blocks; the output projection among them where the embedding that it shares is."""
        kept = {name.removesuffix(".weight") for name, source in self._sources.items() if source.tensor.kind in int4.KINDS}
        if self._tied and _EMBEDDING in kept:
            kept.add("lm_head")
        return frozenset(kept - {_EMBEDDING})

    def read_four_bit(self, name: str, start: int, stop: int) -> int4.Parts:
        source = self._sources[name]
        raw = self._file.rows(source.tensor)
        rows = raw[start:stop] if source.order is None else raw[source.order[start:stop]]
        parts = int4.read_gguf_blocks(rows, source.tensor.kind)
        if not all(bool(torch.isfinite(numbers).all()) for numbers in parts[1:]):
            raise WeightError(f"{self._file.path}: tensor {source.tensor.name} holds NaN or infinite numbers")
        return parts

    def release(self) -> None:
        self._file.release()


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
