"""ModelConfig out of a GGUF file's metadata, by way of what a transformers config of it would hold."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np

from specdec.errors import ModelError, UnknownArchitectureError
from specdec.models.config import ModelConfig, config_from_transformers
from specdec.models.gguf_file import GgufFile

# general.architecture -> transformers config class, and its model_type
GGUF_ARCHITECTURES = {
    "llama": ("LlamaConfig", "llama"),
    "mistral": ("MistralConfig", "mistral"),
    "qwen2": ("Qwen2Config", "qwen2"),
    "qwen3": ("Qwen3Config", "qwen3"),
    "gemma3": ("Gemma3TextConfig", "gemma3_text"),
}
_GEMMA_PATTERN = 6  # every sixth layer sees all, the others a window
_GEMMA_27B_LAYERS = 62  # the one Gemma 3 whose attention scale is not head_dim ** -0.5, told by its depth as in llama.cpp


def gguf_config(file: GgufFile) -> ModelConfig:
    """The architecture that a GGUF file holds.

    Raises:
        UnknownArchitectureError: no decoder is built for it.
        ModelError: a metadata key is missing or its value is not supported.
    """
    arch = file.architecture
    if arch not in GGUF_ARCHITECTURES or f"{arch}.expert_count" in file.metadata:
        known = ", ".join(GGUF_ARCHITECTURES)
        experts = " with experts" if arch in GGUF_ARCHITECTURES else ""
        raise UnknownArchitectureError(f"{file.path}: no decoder for GGUF architecture {arch!r}{experts}; known: {known}")
    tensors = file.tensors
    values = _config_values(file)
    config = config_from_transformers(
        _plain_config(arch, values) or _transformers_config(arch, values), str(file.path), has_lm_head="output.weight" in tensors
    )
    return dataclasses.replace(
        config,
        ropes=_with_rope_factors(file, config),
        torch_dtype=_trained_dtype(file),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
    )


def _plain_config(arch: str, values: dict[str, Any]) -> SimpleNamespace | None:
    """What transformers' config class would hold, without it: to import one takes longer than all else at start-up.

    None where a rope needs transformers' arithmetic.
    """
    rope = values["rope_parameters"]
    if any(kind["rope_type"] != "default" for kind in (rope.values() if arch == "gemma3" else (rope,))):
        return None
    own: dict[str, Any] = {"hidden_act": "silu"}  # attributes of a config
    if arch == "gemma3":
        layers = range(1, values["num_hidden_layers"] + 1)
        kinds = ["full_attention" if layer % _GEMMA_PATTERN == 0 else "sliding_attention" for layer in layers]
        own = {"hidden_activation": "gelu_pytorch_tanh", "layer_types": kinds}
    elif arch in ("qwen2", "qwen3"):
        own["sliding_window"] = None  # only with use_sliding_window, which the files do not tell
    return SimpleNamespace(**values | own, model_type=GGUF_ARCHITECTURES[arch][1])


def _transformers_config(arch: str, values: dict[str, Any]) -> Any:  # any of five config classes
    import transformers

    return getattr(transformers, GGUF_ARCHITECTURES[arch][0])(**values)


def _config_values(file: GgufFile) -> dict[str, Any]:  # keyword arguments of any of the config classes
    arch = file.architecture

    def need(key: str) -> Any:  # metadata value
        value = file.metadata.get(f"{arch}.{key}")
        if value is None:
            raise ModelError(f"{file.path}: metadata key {arch}.{key} is missing")
        return value

    def find(key: str, default: Any = None) -> Any:  # metadata value
        return file.metadata.get(f"{arch}.{key}", default)

    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    hidden, heads, layers = need("embedding_length"), need("attention.head_count"), need("block_count")
    head_dim = find("attention.key_length", hidden // heads)
    values = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": find("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "sliding_window": find("attention.sliding_window"),
    }
    if find("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path}: rope.dimension_count must be the head size {head_dim}, got {find('rope.dimension_count')}")
    rope = {"rope_theta": float(find("rope.freq_base", 10000.0)), **_rope_scaling(file)}
    if arch != "gemma3":
        return {**values, "rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": float(find("rope.freq_base_swa", 10000.0))}
    return {
        **values,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA_27B_LAYERS else head_dim,
        "final_logit_softcapping": find("final_logit_softcapping"),
    }


def _rope_scaling(file: GgufFile) -> dict[str, Any]:  # transformers' rope parameters, bar the base
    prefix = f"{file.architecture}.rope.scaling"
    kind = file.metadata.get(f"{prefix}.type", "none")
    factor = file.metadata.get(f"{prefix}.factor")
    if kind == "none" or not factor:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        original = file.metadata.get(f"{prefix}.original_context_length", file.metadata[f"{file.architecture}.context_length"])
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(original)}
    raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")


def _with_rope_factors(file: GgufFile, config: ModelConfig) -> Any:  # tuple[Rope, ...]
    """Llama 3.1 files hold what its rope scaling divides each frequency by, as the tensor rope_freqs."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return config.ropes
    if tensor.kind != "F32" or tensor.shape != (config.head_dim // 2,):
        raise ModelError(f"{file.path}: rope_freqs.weight must be F32 [{config.head_dim // 2}], got {tensor.kind} {list(tensor.shape)}")
    factors = file.rows(tensor).view(np.float32)[0]
    divided = [np.asarray(rope.inv_freq, dtype=np.float32) / factors for rope in config.ropes]
    return tuple(dataclasses.replace(rope, inv_freq=tuple(freq.tolist())) for rope, freq in zip(config.ropes, divided, strict=True))


def _trained_dtype(file: GgufFile) -> str:
    """Float files keep their dtype; what is quantised was bfloat16 before, for every family here."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")
