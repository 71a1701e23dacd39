"""Logits of every family against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import ModelError
from specdec.models import inspect_model, load_model

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama one kv head": ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama 3.1 rope": ("LlamaConfig", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    "llama linear rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama yarn rope": ("LlamaConfig", {"rope_parameters": {**YARN, "rope_theta": 10000.0}}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "mistral no window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3 tied biases": ("Qwen3Config", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2}),
    "gemma3 soft cap": ("Gemma3TextConfig", {"sliding_window": 8, "final_logit_softcapping": 5.0, "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_logits_equal_transformers(name, sharded, reference_model, logits_of, tmp_path):
    config_class, options = FAMILIES[name]
    reference = reference_model(config_class, **options)
    reference.save_pretrained(tmp_path, max_shard_size="50KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    tokens = torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    loaded = load_model(str(tmp_path), dtype="float32", device=CPU)
    found = logits_of(loaded.model, tokens)
    assert found.dtype == torch.float32
    assert expected.abs().max() > 1.0  # else agreement would say nothing
    assert (found - expected).abs().max() < 1e-3
    assert loaded.config.num_parameters == sum(p.numel() for p in loaded.model.parameters())
    assert loaded.eos_token_ids == {2} and loaded.tokenizer is None


def test_bfloat16_is_near_float32(reference_model, logits_of, tmp_path):
    reference_model("Qwen3Config").save_pretrained(tmp_path)
    tokens = torch.arange(40)
    wide = logits_of(load_model(str(tmp_path), dtype="float32", device=CPU).model, tokens)
    loaded = load_model(str(tmp_path), dtype=torch.bfloat16, device=CPU)
    assert loaded.dtype == loaded.model.lm_head.weight.dtype == torch.bfloat16
    assert (logits_of(loaded.model, tokens) - wide).abs().max() < 0.05 * wide.abs().max()


def test_capture_is_the_residual_stream_of_each_layer(reference_model, attention, tmp_path):
    reference = reference_model("LlamaConfig")
    reference.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="float32", device=CPU).model
    tokens = torch.arange(20)
    with torch.inference_mode():
        states = reference(tokens[None], output_hidden_states=True).hidden_states
        hidden, captured = model(tokens, torch.arange(20), attention(model.attention_specs), capture=(0, 1))
    assert captured.keys() == {0, 1}
    for layer, state in captured.items():
        assert (state - states[layer + 1][0]).abs().max() < 1e-4
    assert (hidden - states[-1][0]).abs().max() < 1e-4  # transformers' last one is after the final norm


def test_windows_and_ropes_follow_layer_types(reference_model, tmp_path):
    reference_model("Gemma3TextConfig", sliding_window=8, num_hidden_layers=4, sliding_window_pattern=2).save_pretrained(tmp_path)
    config = inspect_model(str(tmp_path))
    assert config.windows == (8, 0, 8, 0)
    local, full = (config.ropes[config.layer_ropes[layer]].inv_freq for layer in (0, 1))
    assert local[1] == pytest.approx(10_000.0 ** (-2 / 16)) and full[1] == pytest.approx(1e6 ** (-2 / 16))
    assert [spec.window for spec in config.attention_specs] == [8, 0, 8, 0]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_key_value_heads": 3}, "multiple of KV heads"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(options, word, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(architectures=["LlamaForCausalLM"], **options).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=word):
        inspect_model(str(Path(tmp_path)))
