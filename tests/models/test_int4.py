"""4-bit blocks of GGUF files, run as they are."""

from __future__ import annotations

import pytest
import torch

from specdec.errors import ConfigError
from specdec.kernels.build import load_cpu_kernels
from specdec.llm import LLM
from specdec.models import load_model, open_model, weight_bytes
from specdec.quantization.layers import QuantizedEmbedding, QuantizedLinear
from specdec.quantization.reference import dequantize
from specdec.request import SamplingParams
from tests.models.test_int8 import CPU, _run

KINDS = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_up": "Q4_1", "ffn_down": "Q5_0", "output": "Q4_0"}
FOUR_BIT = {"q_proj", "k_proj", "up_proj", "lm_head"}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def source(request, reference_model, gguf_of, cache, tmp_path):
    """A llama file, whose q and k are permuted, with tensors of many kinds."""
    path = tmp_path / "model.gguf"
    kinds = KINDS | ({"token_embd": "Q4_0"} if request.param else {})
    gguf_of(path, reference_model("LlamaConfig", tie_word_embeddings=request.param), "llama", kinds)
    return str(path)


def test_four_bit_weights_are_kept_as_they_are_and_the_others_in_int8(source):
    wide, loaded = load_model(source, dtype="float32", device=CPU).model, load_model(source, dtype="int4", device=CPU)
    assert (loaded.weights, loaded.dtype, loaded.kv_dtype) == ("int4", torch.float32, torch.bfloat16)
    for name, module in loaded.model.named_modules():
        if isinstance(module, QuantizedLinear):
            kept = name.split(".")[-1] in FOUR_BIT
            assert module.shape.format == ("int4" if kept else "int8"), name
            weight = wide.get_submodule(name).weight
            error = (dequantize(module.blocks, module.shape)[: len(weight)] - weight).abs().amax(-1)
            level = 2**-9 if kept else 0.51 / 127 + 2**-8  # int4: only the rounding of scale and minimum
            assert (error <= weight.abs().amax(-1) * level).all(), name
    assert isinstance(loaded.model.model.embed_tokens, QuantizedEmbedding) == loaded.config.tie_word_embeddings
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in loaded.model.state_dict().values()}
    assert weight_bytes(loaded.config, loaded.precision) == sum(tensors.values())


def test_logits_are_those_of_the_dequantised_weights(source):
    expected, _ = _run(load_model(source, dtype="float32", device=CPU), fused=True)
    for fused in (True, False):
        found, _ = _run(load_model(source, dtype="int4", device=CPU), fused=fused)
        assert (found - expected).norm() < 0.08 * expected.norm()  # random weights pass errors on


def test_the_compiled_forward_does_what_the_modules_do(source):
    if load_cpu_kernels() is None:
        pytest.skip("no compiled kernels here")
    loaded = load_model(source, dtype="int4", device=CPU)
    (logits, _), (expected, _) = (_run(loaded, fused=fused) for fused in (True, False))
    assert (logits - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ids_are_those_of_each_prompt_alone_without_drafts(source, temperature):
    prompts = [[5, 6, 7, 5, 6, 7, 5], list(range(3, 40)), [9]]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
    alone = LLM(source, dtype="int4", num_pages=64, max_num_seqs=1)
    together = LLM(source, dtype="int4", num_pages=64, max_num_seqs=3, drafter="ngram", draft_budget="all", prefill_chunk=8)
    expected = [alone.generate([prompt], params)[0].token_ids for prompt in prompts]
    outputs = together.generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.stats.drafted for output in outputs) > 0


def test_int4_all_keeps_four_bit_weights_and_rounds_the_others(source):
    wide, loaded = load_model(source, dtype="float32", device=CPU).model, load_model(source, dtype="int4-all", device=CPU)
    assert loaded.weights == "int4-all"
    for name, module in loaded.model.named_modules():
        if isinstance(module, QuantizedLinear):
            assert module.shape.format == "int4", name
            weight = wide.get_submodule(name).weight
            error = (dequantize(module.blocks, module.shape)[: len(weight)] - weight).square().mean() / weight.square().mean()
            kept = name.split(".")[-1] in FOUR_BIT or (name == "lm_head" and loaded.config.tie_word_embeddings)
            assert error < (1e-5 if kept else 0.01), name
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in loaded.model.state_dict().values()}
    assert weight_bytes(loaded.config, loaded.precision) == sum(tensors.values())


def test_auto_of_a_draft_model_takes_fewer_bits_than_that_of_a_target(reference_model, gguf_of, tmp_path):
    gguf_of(tmp_path / "wide.gguf", reference_model("LlamaConfig"), "llama")
    found = open_model(str(tmp_path / "wide.gguf"))
    plain = found.precision("auto", CPU)
    assert found.precision("auto-draft", CPU).weights == ("int4-all" if plain.quantized else plain.weights)


def test_a_model_without_four_bit_blocks_is_refused(reference_model, gguf_of, tmp_path):
    gguf_of(tmp_path / "wide.gguf", reference_model("LlamaConfig"), "llama")
    with pytest.raises(ConfigError, match=r"int4 keeps the 4-bit blocks of a GGUF file .* has none: take int8"):
        open_model(str(tmp_path / "wide.gguf")).precision("int4", CPU)
