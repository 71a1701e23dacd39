"""Models loaded as int8: close to float32, the same through the compiled forward and through the modules, and as large as planned."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.backend.cpu import CPUBackend
from specdec.errors import WeightError
from specdec.kernels.build import load_cpu_kernels
from specdec.kernels.quantized_ops import quantized_is_fast
from specdec.kv_manager.storage import KVStorage
from specdec.models import huge_pages, load_model, open_model, weight_bytes
from specdec.models.huge_pages import read_into_huge_pages
from specdec.pack import PackRow
from specdec.quantization.layers import QuantizedEmbedding, QuantizedLinear, WideEmbedding
from specdec.quantization.reference import dequantize
from specdec.runner import ModelRunner

CPU = torch.device("cpu")
FAMILIES = {
    "llama": ("LlamaConfig", "llama", {}),
    "llama tied biases": ("LlamaConfig", "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "qwen3", {}),
    "gemma3": ("Gemma3TextConfig", "gemma3", {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 16}),
}
TOKENS = torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(1)).tolist()
NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(params=FAMILIES)
def source(request, reference_model, gguf_of, cache, tmp_path):
    """A GGUF file of each family; q and k of llama files are permuted in it, norms of gemma ones offset."""
    config_class, arch, options = FAMILIES[request.param]
    path = tmp_path / "model.gguf"
    gguf_of(path, reference_model(config_class, **options), arch)
    return path


def _load(source, dtype="int8"):
    return load_model(str(source) if isinstance(source, Path) else source, dtype=dtype, device=CPU)


def _run(loaded, *, fused, capture=()):
    config = loaded.config
    storage = KVStorage(config.num_layers, 4, 16, config.num_kv_heads, config.head_dim, loaded.kv_dtype)
    runner = ModelRunner(loaded.model, CPUBackend() if fused else _Unfused(), storage)
    output = runner.forward([PackRow(TOKENS, 0, np.arange(4, dtype=np.int32), len(TOKENS))], capture)
    return output.logits.clone(), output.hidden


class _Unfused(CPUBackend):
    """Runs module by module."""

    def fuse(self, tensors):
        return None


def test_every_linear_layer_is_int8_and_all_else_float32(source):
    loaded = _load(source)
    assert (loaded.weights, loaded.dtype, loaded.kv_dtype) == ("int8", torch.float32, torch.bfloat16)
    modules = dict(loaded.model.named_modules())
    linears = [module for module in modules.values() if isinstance(module, QuantizedLinear)]
    assert len(linears) == 7 * loaded.config.num_layers + 1 and not any(isinstance(m, torch.nn.Linear) for m in modules.values())
    tied = loaded.config.tie_word_embeddings
    assert isinstance(loaded.model.model.embed_tokens, QuantizedEmbedding if tied else WideEmbedding)
    for name, tensor in loaded.model.state_dict().items():
        kinds = {"blocks": torch.uint8, "embed_tokens.weight": torch.bfloat16}
        assert tensor.dtype == next((kind for ending, kind in kinds.items() if name.endswith(ending)), torch.float32), name


def test_weights_are_those_of_the_checkpoint_to_half_a_level(source):
    wide, loaded = _load(source, "float32").model, _load(source)
    for name, module in loaded.model.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = wide.get_submodule(name).weight
            error = (dequantize(module.blocks, module.shape) - weight).abs().amax(-1)
            assert (error <= weight.abs().amax(-1) * (0.51 / 127 + 2**-8)).all(), name
            if module.bias is not None:
                assert torch.equal(module.bias, wide.get_submodule(name).bias)


@pytest.mark.parametrize("fused", [True, False])
def test_logits_are_close_to_those_in_float32(source, fused):
    expected, _ = _run(_load(source, "float32"), fused=True)
    found, _ = _run(_load(source), fused=fused)
    assert (found - expected).norm() < 0.08 * expected.norm()  # random weights pass errors on
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8


def test_the_compiled_forward_does_what_the_modules_do(source):
    loaded = _load(source)
    if load_cpu_kernels() is None:
        pytest.skip("no compiled kernels here")
    last = loaded.config.num_layers - 1
    logits, hidden = _run(loaded, fused=True, capture=(0, last))
    expected_logits, expected = _run(loaded, fused=False, capture=(0, last))
    assert hidden.keys() == expected.keys() == {0, last}
    # a value at the middle between two levels may be rounded either way, which changes its row by up to a level
    scale = expected[0].abs().amax(-1, keepdim=True)
    close = ((hidden[0] - expected[0]).abs() <= 1e-4 * scale).all(-1)
    assert close.float().mean() > 0.8
    assert ((hidden[0] - expected[0]).abs() <= 0.05 * scale).all()
    assert (hidden[last] - expected[last]).norm() < 0.02 * expected[last].norm()
    assert (logits - expected_logits).norm() < 0.02 * expected_logits.norm()


def test_a_folder_gives_what_a_gguf_file_gives(reference_model, gguf_of, cache, tmp_path):
    reference = reference_model("LlamaConfig")
    gguf_of(tmp_path / "model.gguf", reference, "llama")
    reference.save_pretrained(tmp_path / "folder")
    one, other = (_load(tmp_path / name).model.state_dict() for name in ("model.gguf", "folder"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_planned_bytes_are_those_loaded(source):
    for dtype in ("int8", "float32", "bfloat16"):
        loaded = _load(source, dtype)
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in loaded.model.state_dict().values()}
        assert weight_bytes(loaded.config, loaded.precision) == sum(tensors.values())


def test_after_a_conversion_nothing_of_the_gguf_file_stays_in_memory(source):
    opened = open_model(str(source))
    assert _resident_kb(source) > 0
    _load(opened)
    assert _resident_kb(source) == 0
    assert opened.file is not None and opened.file.rows(opened.file.tensors["output_norm.weight"]).any()  # is there when it is needed


def _resident_kb(path):
    """Of a mapped file, by the system's books."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("this system does not tell")
    mappings = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", smaps.read_text())
    assert mappings
    return sum(map(int, mappings))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named(llama_folder, cache, value):
    tensors = {name: tensor.clone() for name, tensor in load_file(llama_folder / "model.safetensors").items()}
    tensors[NAME].view(-1)[5] = value
    save_file(tensors, llama_folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=rf"model\.safetensors: tensor {NAME} holds NaN"):
        _load(llama_folder)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_misshapen_tensor_is_named_before_anything_is_converted(llama_folder, cache):
    tensors = {name: tensor.clone() for name, tensor in load_file(llama_folder / "model.safetensors").items()}
    tensors[NAME] = tensors[NAME][:-1].clone()  # fills as many tiles as it should
    save_file(tensors, llama_folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=rf"{NAME} must have shape \[32, 64\], got \[31, 64\]"):
        _load(llama_folder)
    assert not cache.exists()


@pytest.fixture
def blocks_file(tmp_path):
    path = tmp_path / "model.safetensors"
    random = torch.Generator().manual_seed(0)
    save_file({name: torch.randint(0, 256, (3, 5 << 20), dtype=torch.uint8, generator=random) for name in ("a", "b")}, path)
    return path


def test_blocks_in_huge_pages_are_those_of_the_file(blocks_file, monkeypatch):
    monkeypatch.setattr(huge_pages, "_LEAST_BYTES", 1)
    monkeypatch.setattr(huge_pages, "_PIECE_BYTES", (1 << 20) + 13)
    monkeypatch.setattr(huge_pages, "_are_offered", lambda: True)
    taken = iter([0, 1 << 40])
    monkeypatch.setattr(huge_pages, "_huge_bytes", lambda: next(taken))
    found, expected = read_into_huge_pages(blocks_file, ["a", "b"]), load_file(blocks_file)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_without_huge_pages_the_file_stays_mapped(blocks_file, monkeypatch):
    assert read_into_huge_pages(blocks_file, ["a", "b"]) == {}  # smaller than the caches
    monkeypatch.setattr(huge_pages, "_LEAST_BYTES", 1)
    monkeypatch.setattr(huge_pages, "_huge_bytes", lambda: 0)
    assert read_into_huge_pages(blocks_file, ["a", "b"]) == {}
    blocks_file.with_name("enabled").write_text("always madvise [never]")
    monkeypatch.setattr(huge_pages, "_SETTING", blocks_file.with_name("enabled"))
    monkeypatch.setattr(huge_pages, "_huge_bytes", lambda: pytest.fail("asked though there are none"))
    assert read_into_huge_pages(blocks_file, ["a", "b"]) == {}


def test_auto_runs_the_tiny_families_as_the_machine_allows(source):
    loaded = _load(source, "auto")
    assert loaded.weights == ("int8" if quantized_is_fast() else "float32")
    assert loaded.precision.reason
