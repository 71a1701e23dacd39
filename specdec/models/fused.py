"""What a built decoder hands to a backend that runs its forwards in one call."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from specdec.kernels.decoder_ops import DecoderTensors, LayerTensors, LinearTensors
from specdec.models.decoder import Decoder
from specdec.models.layers import DecoderLayer, RMSNorm
from specdec.quantization.layers import QuantizedLinear


def decoder_tensors(model: Decoder) -> DecoderTensors | None:
    """The tensors of a decoder whose linear layers are all quantised or all bfloat16; None for others.

    Weights are those of the model, not copies.
    """
    config = model.config
    if not (isinstance(model.lm_head, QuantizedLinear) or _is_bfloat16(model.lm_head)):
        return None
    head = _linear(model.lm_head)
    embedding = model.model.embed_tokens
    tables = model.rotary.tables(head.weight.device)
    layers = [
        _layer(layer, window, *tables[rope])
        for layer, window, rope in zip(model.model.layers, config.windows, config.layer_ropes, strict=True)
        if isinstance(layer, DecoderLayer)
    ]
    return DecoderTensors(
        layers=layers,
        head=head,
        embedding=embedding.weight.detach().to(torch.bfloat16).contiguous() if isinstance(embedding, nn.Embedding) else None,
        final_norm=_norm(model.model.norm),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        attention_scale=config.attention_scale,
        attention_soft_cap=config.attention_soft_cap,
        logits_soft_cap=config.logits_soft_cap,
        embedding_scale=config.embedding_scale,
        activation=config.activation,
    )


def _layer(layer: DecoderLayer, window: int, cos: Tensor, sin: Tensor) -> LayerTensors:
    attention, mlp = layer.self_attn, layer.mlp
    return LayerTensors(
        q=_linear(attention.q_proj),
        k=_linear(attention.k_proj),
        v=_linear(attention.v_proj),
        o=_linear(attention.o_proj),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        input_norm=_norm(layer.input_layernorm),
        q_norm=_norm(attention.q_norm) if isinstance(attention.q_norm, RMSNorm) else None,
        k_norm=_norm(attention.k_norm) if isinstance(attention.k_norm, RMSNorm) else None,
        attention_out_norm=_norm(layer.post_attention_layernorm) if layer.sandwich_norms else None,
        feed_forward_in_norm=_norm(layer.pre_feedforward_layernorm if layer.sandwich_norms else layer.post_attention_layernorm),
        feed_forward_out_norm=_norm(layer.post_feedforward_layernorm) if layer.sandwich_norms else None,
        window=window,
        cos=cos,
        sin=sin,
    )


def _is_bfloat16(linear: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(linear, nn.Linear) and linear.weight.dtype == torch.bfloat16


def _linear(linear: nn.Module) -> LinearTensors:
    if _is_bfloat16(linear):
        bias = None if linear.bias is None else linear.bias.detach().float()
        return LinearTensors(linear.out_features, linear.in_features, "bfloat16", linear.weight.detach(), bias)
    assert isinstance(linear, QuantizedLinear)
    return LinearTensors(linear.shape.outputs, linear.shape.inputs, linear.shape.format, linear.blocks, linear.bias)


def _norm(norm: RMSNorm) -> Tensor:
    """Its weight, with the offset that some architectures add."""
    return norm.weight.detach().float() + norm.offset
