"""ModelConfig: all that the decoder needs to know about a model, as plain numbers. Built from a transformers config.

Not here: how a config is found (loading.py) or read out of a GGUF file (gguf_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.backend.base import AttentionSpec
from specdec.errors import ModelError, UnknownArchitectureError

# model_type -> the causal-LM class whose checkpoints have the decoder's parameter names
ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Rope:
    """One rotary embedding.

    Attributes:
        inv_freq: head_dim / 2 inverse frequencies in radians per position, exact as float32.
        scaling: factor on cos and sin.
    """

    inv_freq: tuple[float, ...]
    scaling: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's architecture.

    Attributes:
        architecture: transformers' class name of the checkpoint, such as `LlamaForCausalLM`.
        windows: per layer, the sliding window of `AttentionSpec.window`; 0 sees all.
        ropes: the rotary embeddings in use.
        layer_ropes: per layer, an index into `ropes`.
        attention_scale: factor on q·k.
        attention_soft_cap, logits_soft_cap: `cap * tanh(x / cap)`; 0 for none.
        activation: a key of `activations.ACTIVATIONS`.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: RMS norm over each head of q and k before the rotary embedding.
        norm_offset: added to every norm weight (1 for Gemma, which stores weight - 1, and then multiplies in float32).
        sandwich_norms: norms also after attention and after the feed-forward.
        embedding_scale: factor on the token embeddings.
        torch_dtype: name of the dtype of the checkpoint, such as `bfloat16`.
        eos_token_ids: end tokens named by the config; `LoadedModel.eos_token_ids` is the full set.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]
    attention_scale: float
    activation: str = "silu"
    attention_soft_cap: float = 0.0
    logits_soft_cap: float = 0.0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    torch_dtype: str = "float32"
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One per layer."""
        return tuple(
            AttentionSpec(self.num_heads, self.num_kv_heads, self.head_dim, self.attention_scale, window, self.attention_soft_cap)
            for window in self.windows
        )

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights, tied ones once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (q + kv) + (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.o_bias
        mlp = 3 * self.hidden_size * self.intermediate_size + (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        norms = self.hidden_size * (4 if self.sandwich_norms else 2) + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + norms) + embeddings + self.hidden_size

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that one token keeps in the KV pool, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def check_architecture(values: Mapping[str, Any], source: str) -> str:
    """The model_type of a raw config.json. Raises UnknownArchitectureError when no decoder here is built for it."""
    model_type = str(values.get("model_type"))
    named = (values.get("architectures") or [ARCHITECTURES.get(str(model_type))])[0]
    if model_type not in ARCHITECTURES or named != ARCHITECTURES[model_type]:
        known = ", ".join(sorted(ARCHITECTURES.values()))
        raise UnknownArchitectureError(f"{source}: no decoder for architecture {named!r} (model_type {model_type!r}); known: {known}")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{source}: checkpoints quantised by {method!r} cannot be read; take an unquantised or a GGUF one")
    return model_type


def config_from_transformers(hf: Any, source: str, *, has_lm_head: bool | None = None) -> ModelConfig:  # hf: any of five config classes
    """Builds a ModelConfig.

    Args:
        hf: a transformers config whose model_type is in `ARCHITECTURES`.
        source: named in errors.
        has_lm_head: overrides `tie_word_embeddings` where the weights tell.
    """
    family = hf.model_type
    gemma = family == "gemma3_text"
    if getattr(hf, "use_bidirectional_attention", False):
        raise ModelError(f"{source}: a bidirectional encoder (use_bidirectional_attention) cannot generate; take a causal model")
    activation = hf.hidden_activation if gemma else hf.hidden_act
    if activation not in ACTIVATION_NAMES:
        raise ModelError(f"{source}: unknown activation {activation!r}; known: {', '.join(ACTIVATION_NAMES)}")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if hf.num_attention_heads % hf.num_key_value_heads or head_dim % 2:
        raise ModelError(
            f"{source}: heads must be a multiple of KV heads and head_dim even, "
            f"got {hf.num_attention_heads}, {hf.num_key_value_heads} and {head_dim}"
        )
    windows, ropes, layer_ropes = _layers(hf, head_dim, source)
    bias = bool(getattr(hf, "attention_bias", False))
    dtype = getattr(hf, "dtype", None)
    return ModelConfig(
        architecture=ARCHITECTURES[family],
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        windows=windows,
        ropes=ropes,
        layer_ropes=layer_ropes,
        attention_scale=(hf.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        activation=ACTIVATION_NAMES[activation],
        attention_soft_cap=float(getattr(hf, "attn_logit_softcapping", None) or 0.0),
        logits_soft_cap=float(getattr(hf, "final_logit_softcapping", None) or 0.0),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=family in ("qwen3", "gemma3_text"),
        norm_offset=1.0 if gemma else 0.0,
        sandwich_norms=gemma,
        embedding_scale=hf.hidden_size**0.5 if gemma else 1.0,
        tie_word_embeddings=bool(hf.tie_word_embeddings) if has_lm_head is None else not has_lm_head,
        torch_dtype=str(dtype).removeprefix("torch.") if dtype is not None else "float32",
        eos_token_ids=as_id_set(hf.eos_token_id),
    )


def as_id_set(ids: int | list[int] | None) -> frozenset[int]:
    """Token ids as configs write them: one, several or none."""
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _layers(hf: Any, head_dim: int, source: str) -> tuple[tuple[int, ...], tuple[Rope, ...], tuple[int, ...]]:
    """Windows, distinct ropes, and the rope index of each layer."""
    layers = hf.num_hidden_layers
    window = int(getattr(hf, "sliding_window", None) or 0)
    types = getattr(hf, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != layers:
        raise ModelError(f"{source}: layer_types must name {layers} layers, each sliding_attention or full_attention, got {types}")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    if hf.model_type != "gemma3_text":
        return windows, (_rope(hf, None, head_dim, source),), (0,) * layers
    kinds = sorted(set(types))
    return windows, tuple(_rope(hf, kind, head_dim, source) for kind in kinds), tuple(kinds.index(kind) for kind in types)


def _rope(hf: Any, layer_type: str | None, head_dim: int, source: str) -> Rope:
    import torch

    parameters = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    kind = parameters["rope_type"]
    if kind not in ROPE_TYPES:
        raise ModelError(f"{source}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor must be 1 for {hf.model_type}, got {parameters['partial_rotary_factor']}")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return Rope(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), layer_type=layer_type)
    return Rope(tuple(inv_freq.float().tolist()), float(scaling))
