"""Tiny random checkpoints of every family, attention without a pool, and a cache folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.backend.base import Attend, AttentionSpec
from specdec.models import Decoder

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def dense_attention(specs: Sequence[AttentionSpec]) -> Attend:
    """Causal attention over one whole sequence, in float32."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = specs[layer]
        group = spec.num_heads // spec.num_kv_heads
        k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        rows = torch.arange(len(q))
        seen = rows[None, :] <= rows[:, None]
        if spec.window:
            seen &= rows[None, :] > rows[:, None] - spec.window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)

    return attend


@pytest.fixture
def logits_of() -> Callable[[Decoder, Tensor], Tensor]:
    """float32 [T, vocabulary] of a whole sequence of tokens, int64 [T]."""

    def run(model: Decoder, tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            hidden, _ = model(tokens, torch.arange(len(tokens)), dense_attention(model.attention_specs))
            return model.logits(hidden)

    return run


@pytest.fixture
def attention() -> Callable[[Sequence[AttentionSpec]], Attend]:
    return dense_attention


@pytest.fixture
def reference_model() -> Callable[..., Any]:
    """Makes a small random model of transformers, from its config class's name and options."""

    def make(config_class: str, **options: Any) -> Any:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**SIZES | options)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", ".bias")):  # constant when new, which would hide mistakes
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        return model

    return make


@pytest.fixture
def llama_folder(reference_model: Callable[..., Any], tmp_path: Path) -> Path:
    """A folder with a small Llama, untied."""
    folder = tmp_path / "llama"
    reference_model("LlamaConfig").save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $SPECDEC_CACHE, where the smallest model is kept."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("specdec.models.converted.LEAST_KEPT_BYTES", 0)
    monkeypatch.setenv("SPECDEC_CACHE", str(folder))
    return folder


def write_gguf(path: Path, reference: Any, arch: str, kinds: dict[str, str] | None = None, tokenizer: bool = True) -> None:
    """Writes a model of transformers as llama.cpp's converter does.

    Args:
        arch: general.architecture.
        kinds: quantisation type by the last part of a tensor's name, such as `attn_q`; float32 where not named.
        tokenizer: with a vocabulary.
    """
    import gguf

    config = reference.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if tokenizer:
        add_vocabulary(writer, config.vocab_size)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if arch == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            data = data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            data = data + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(target.split(".")[-2], "F32")]
        if kind != gguf.GGMLQuantizationType.F32:
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(target, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, size: int) -> None:
    """A byte-level vocabulary of `size` tokens whose first are control tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())][:size]
    tokens += [f"[PAD{index}]" for index in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (size - 3))
    writer.add_token_merges([])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")


@pytest.fixture
def gguf_of() -> Callable[..., None]:
    return write_gguf
