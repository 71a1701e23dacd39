"""The parts of a decoder layer. They know neither quantisation nor parallelism: those are passes over the built model.

Sizes come from the weights' own shapes where a pass may change them, so that a sharded projection just yields fewer heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.backend.base import Attend
from specdec.models.activations import ACTIVATIONS
from specdec.models.config import ModelConfig
from specdec.models.rotary import Rotation, rotate


class Linear(nn.Linear):
    """nn.Linear that spends no time on initial values on the meta device: they cost seconds there, and are loaded over."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Embedding(nn.Embedding):
    """nn.Embedding, likewise."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset) over the last dimension.

    With an offset the product is taken in float32 and rounded once, as Gemma does; without, the normalised x is rounded first, as
    Llama does.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (wide * (self.weight.float() + self.offset)).to(x.dtype)
        return wide.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Projections, head norms and rotary embedding around the backend's attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(hidden, q, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, kv, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, kv, bias=config.qkv_bias)
        self.o_proj = Linear(q, hidden, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        heads = (x.shape[0], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), rotation)  # [T, num_heads, head_dim]
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), rotation)  # [T, num_kv_heads, head_dim]
        v = self.v_proj(x).view(heads)
        out: Tensor = self.o_proj(attend(self.layer, q, k, v).reshape(x.shape[0], -1))
        return out


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it and, for Gemma, one after it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        norm = (config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.sandwich_norms = config.sandwich_norms
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = RMSNorm(*norm)
            self.post_feedforward_layernorm = RMSNorm(*norm)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        attention = self.self_attn(self.input_layernorm(x), rotation, attend)
        if not self.sandwich_norms:
            x = x + attention
            return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]  # nn.Module calls are untyped
        x = x + self.post_attention_layernorm(attention)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))  # type: ignore[no-any-return]
