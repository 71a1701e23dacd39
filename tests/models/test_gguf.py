"""GGUF files: names, layouts and metadata of each architecture, quantisation types, and files that are broken."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from specdec.errors import ModelError, UnknownArchitectureError, WeightError
from specdec.models import inspect_model, load_model
from specdec.models.gguf_file import read_gguf

CPU = torch.device("cpu")
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "llama", {}),
    "llama tied biases": ("LlamaConfig", "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama linear": ("LlamaConfig", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "llama yarn": (
        "LlamaConfig",
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0}},
    ),
    "qwen2": ("Qwen2Config", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "qwen3", {}),
    "gemma3": ("Gemma3TextConfig", "gemma3", {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 16}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_the_converted_model(name, reference_model, gguf_of, logits_of, cache, tmp_path):
    config_class, arch, options = FAMILIES[name]
    reference = reference_model(config_class, **options)
    path = tmp_path / "model.gguf"
    gguf_of(path, reference, arch)
    tokens = torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    loaded = load_model(str(path), dtype="float32", device=CPU)
    assert expected.abs().max() > 1.0
    assert (logits_of(loaded.model, tokens) - expected).abs().max() < 1e-3
    assert loaded.eos_token_ids == {0, 2}
    assert loaded.config.num_parameters == sum(p.numel() for p in loaded.model.parameters())


def test_llama_3_rope_factors_are_taken_from_the_file(reference_model, gguf_of, cache, tmp_path):
    path = tmp_path / "model.gguf"
    reference = reference_model("LlamaConfig", tie_word_embeddings=True)
    plain = tmp_path / "plain.gguf"
    gguf_of(plain, reference, "llama")
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    state = reference.state_dict()
    reference.state_dict = lambda: state | {"rope_freqs.weight": torch.from_numpy(factors)}
    gguf_of(path, reference, "llama")
    found, base = inspect_model(str(path)).ropes[0].inv_freq, inspect_model(str(plain)).ropes[0].inv_freq
    np.testing.assert_allclose(np.array(base) / np.array(found), factors, rtol=1e-6)
    load_model(str(path), dtype="float32", device=CPU)


@pytest.mark.parametrize(
    ("kind", "error"), [("Q4_0", 0.15), ("Q4_1", 0.15), ("Q5_0", 0.08), ("Q5_1", 0.08), ("Q8_0", 0.01), ("F16", 1e-3), ("BF16", 5e-3)]
)
def test_simple_quantisation_types(kind, error, reference_model, gguf_of, cache, tmp_path):
    reference = reference_model("LlamaConfig")
    path = tmp_path / "model.gguf"
    parts = ("attn_q", "attn_k", "ffn_down", "token_embd", "output")
    gguf_of(path, reference, "llama", dict.fromkeys(parts, kind))
    assert read_gguf(path).tensors["blk.0.attn_q.weight"].kind == kind
    for dtype in (torch.float32, torch.bfloat16):
        found = load_model(str(path), dtype=dtype, device=CPU).model.state_dict()
        for name, expected in reference.state_dict().items():
            limit = max(error, 5e-3 if dtype == torch.bfloat16 else 1e-7) * expected.abs().max()
            assert (found[name].float() - expected).abs().max() <= limit, name


def _scales_and_mins(block, group):
    """6-bit scale and minimum of a group of 32, as ggml packs them into 12 bytes."""
    packed = block[4:16]
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    return (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4), (packed[group + 4] >> 4) | (packed[group] >> 6 << 4)


def _half(block, at):
    return float(np.array(block[at : at + 2], dtype=np.uint8).view(np.float16)[0])


def _q4_k(block):
    scale, minimum = _half(block, 0), _half(block, 2)
    for i in range(256):
        group = i // 32
        byte = block[16 + group // 2 * 32 + i % 32]
        factor, low = _scales_and_mins(block, group)
        yield scale * factor * (byte >> 4 if group % 2 else byte & 15) - minimum * low


def _q5_k(block):
    scale, minimum = _half(block, 0), _half(block, 2)
    for i in range(256):
        group = i // 32
        byte = block[48 + group // 2 * 32 + i % 32]
        number = (byte >> 4 if group % 2 else byte & 15) + 16 * (block[16 + i % 32] >> group & 1)
        factor, low = _scales_and_mins(block, group)
        yield scale * factor * number - minimum * low


def _q6_k(block):
    scale = _half(block, 208)
    for i in range(256):
        half, quarter, lane = i // 128, i % 128 // 32, i % 32
        byte = block[half * 64 + quarter % 2 * 32 + lane]
        low = byte >> 4 if quarter > 1 else byte & 15
        high = block[128 + half * 32 + lane] >> 2 * quarter & 3
        factor = int(np.int8(np.uint8(block[192 + half * 8 + quarter * 2 + lane // 16])))
        yield scale * factor * ((low | high << 4) - 32)


K_TYPES = {"Q4_K": (144, _q4_k, (0, 2)), "Q5_K": (176, _q5_k, (0, 2)), "Q6_K": (210, _q6_k, (208,))}


@pytest.mark.parametrize("kind", K_TYPES)
def test_k_quantisation_types(kind, reference_model, cache, tmp_path, monkeypatch, gguf_of):
    size, reference_decoder, halves = K_TYPES[kind]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (4 * 64, 1, size), dtype=np.uint8)
    for at in halves:
        rows[..., at : at + 2] = np.float16(rng.uniform(0.001, 0.1, (4 * 64, 1, 1))).view(np.uint8)
    expected = torch.tensor([list(reference_decoder(row[0].tolist())) for row in rows])
    options = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4, "num_hidden_layers": 1, "tie_word_embeddings": True}
    path = tmp_path / "model.gguf"
    quantize = gguf.quants.quantize
    monkeypatch.setattr(gguf.quants, "quantize", lambda data, q: rows.reshape(256, size) if q.name == kind else quantize(data, q))
    gguf_of(path, reference_model("LlamaConfig", **options), "llama", {"attn_v": kind})
    found = load_model(str(path), dtype="float32", device=CPU).model.state_dict()["model.layers.0.self_attn.v_proj.weight"]
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_other_quantisation_types_are_refused_by_name(reference_model, gguf_of, cache, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    monkeypatch.setattr(gguf.quants, "quantize", lambda data, kind: np.zeros((len(data), data.shape[1] // 32 * 18), dtype=np.uint8))
    gguf_of(path, reference_model("LlamaConfig"), "llama", {"ffn_up": "IQ4_NL"})
    with pytest.raises(WeightError, match=r"blk\.0\.ffn_up\.weight is IQ4_NL.*Q4_K"):
        load_model(str(path), dtype="float32", device=CPU)


@pytest.mark.parametrize("keep", [0, 10, 300, 3000, -5000, -1])
def test_a_file_cut_short_is_named(keep, reference_model, gguf_of, cache, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_of(path, reference_model("LlamaConfig"), "llama")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.gguf: (cut short|cannot be read)"):
        load_model(str(path), dtype="float32", device=CPU)


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        inspect_model(str(path))
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelError, match="version must be 2 or 3"):
        inspect_model(str(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), ["model.layers.1.mlp.up_proj.weight", "missing"]),
        (lambda s: s.update({"model.layers.0.mlp.up_proj.weight": torch.ones(3, 64)}), ["model.layers.0.mlp.up_proj.weight", "[3, 64]"]),
        (lambda s: s["model.layers.2.mlp.up_proj.weight"].fill_(torch.nan), ["blk.2.ffn_up.weight", "NaN"]),
        (lambda s: s.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}), ["blk.0.attn_rot_embd", "no place"]),
    ],
    ids=["missing", "misshapen", "nan", "unknown"],
)
def test_a_bad_tensor_is_named(change, words, reference_model, gguf_of, cache, tmp_path):
    reference = reference_model("LlamaConfig")
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    change(state)
    reference.state_dict = lambda: state
    path = tmp_path / "model.gguf"
    gguf_of(path, reference, "llama")
    with pytest.raises(WeightError) as caught:
        load_model(str(path), dtype="float32", device=CPU)
    for word in [*words, "model.gguf"]:
        assert word in str(caught.value)


def test_an_unknown_architecture_is_named(reference_model, gguf_of, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_of(path, reference_model("LlamaConfig"), "llama", tokenizer=False)
    path.write_bytes(path.read_bytes().replace(b"llama", b"lamma"))
    with pytest.raises(UnknownArchitectureError, match="'lamma'"):
        inspect_model(str(path))
