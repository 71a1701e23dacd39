"""Devices and models that the built-in profiles are made of, counted from published configurations."""

from __future__ import annotations

from specdec.scheduler.simulator.roofline import Device, Experts, ModelShape

# NVIDIA H200 SXM data sheet: 4.8 TB/s, 989 TFLOP/s dense bf16, 141 GB, NVLink 900 GB/s both ways together.
H200 = Device("H200", bandwidth=4.8e12, flops=989e12, memory=141e9, link_bandwidth=450e9)


def grouped_query_decoder(layers: int, hidden: int, heads: int, kv_heads: int, head_size: int, width: int, vocab: int) -> ModelShape:
    """A dense decoder with grouped-query attention and a gated feed-forward of `width`, such as Llama 3; weights and KV in bf16."""
    attention = hidden * head_size * (2 * heads + 2 * kv_heads)  # q and o, k and v
    head = float(hidden * vocab)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        dense_params=layers * (attention + 3.0 * hidden * width) + head,
        head_params=head,
        kv_values=2 * layers * kv_heads * head_size,
        attention_width=2 * heads * head_size,
    )


def deepseek_v3(layers: int = 61, dense_layers: int = 3) -> ModelShape:
    """DeepSeek-V3, fp8 weights, latent KV in bf16. With fewer layers: its multi-token prediction module.

    Queries attend in the latent space (512 + 64 values per key, 512 per value), as decoding kernels do it.
    """
    hidden, heads, latent, rope = 7168, 128, 512, 64
    query = hidden * 1536 + 1536 * heads * (128 + rope)
    attention = query + hidden * (latent + rope) + latent * heads * (128 + 128) + heads * 128 * hidden
    moe_layers = layers - dense_layers
    router_and_shared = hidden * 256 + 3.0 * hidden * 2048
    head = float(hidden * 129280)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        dense_params=layers * attention + dense_layers * 3.0 * hidden * 18432 + moe_layers * router_and_shared + head,
        head_params=head,
        kv_values=layers * (latent + rope),
        attention_width=heads * (latent + rope + latent),
        experts=Experts(layers=moe_layers, total=256, active=8, width=2048),
        weight_bytes=1.0,
        kv_shared=True,
    )


LLAMA_1B = grouped_query_decoder(16, 2048, 32, 8, 64, 8192, 128256)
LLAMA_8B = grouped_query_decoder(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_8B_HEAD = grouped_query_decoder(1, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = grouped_query_decoder(80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_70B_HEAD = grouped_query_decoder(1, 8192, 64, 8, 128, 28672, 128256)
DEEPSEEK_V3 = deepseek_v3()
DEEPSEEK_V3_HEAD = deepseek_v3(layers=1, dense_layers=0)
