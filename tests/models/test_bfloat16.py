"""bfloat16 weights in the compiled forward: close to float32, used where they lie, and a row's bits whatever the other rows are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.backend.cpu import CPUBackend
from specdec.kernels.quantized_ops import bfloat16_is_fast
from specdec.kv_manager.storage import KVStorage
from specdec.llm import LLM
from specdec.models import inspect_model, load_model
from specdec.models.fused import decoder_tensors
from specdec.models.precision import resolve_precision
from specdec.pack import PackRow
from specdec.request import SamplingParams
from specdec.runner import ModelRunner
from tests.models.test_int8 import FAMILIES, _run

CPU = torch.device("cpu")
RAGGED = {"hidden_size": 72, "intermediate_size": 100, "vocab_size": 97, "num_attention_heads": 3, "num_key_value_heads": 1}
"""Inputs and outputs that are not whole steps, quads and tiles."""
WIDE = {"hidden_size": 1056, "intermediate_size": 2048, "num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True}
TOKENS = torch.randint(0, 96, (90,), generator=torch.Generator().manual_seed(2)).tolist()
PAGES = np.arange(8, dtype=np.int32)

compiled = pytest.mark.skipif(not bfloat16_is_fast(), reason="this processor has no AVX512_BF16, or there are no compiled kernels")


@pytest.fixture(params=[*FAMILIES, "ragged"])
def folder(request, reference_model, tmp_path):
    config_class, _, options = FAMILIES.get(request.param, ("LlamaConfig", "llama", RAGGED))
    reference_model(config_class, **options).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture(params=[RAGGED, WIDE], ids=["ragged", "wide"])
def runner(request, reference_model, tmp_path):
    reference_model("LlamaConfig", **request.param).save_pretrained(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), dtype="bfloat16", device=CPU)
    return ModelRunner(loaded.model, CPUBackend(), _storage(loaded))


def _storage(loaded):
    config = loaded.config
    return KVStorage(config.num_layers, 16, 16, config.num_kv_heads, config.head_dim, loaded.kv_dtype)


def _in_chunks(runner, sizes):
    """Logits [T, vocabulary] and the first layer's output [T, hidden] of TOKENS, in chunks of the given sizes, over and over."""
    logits, hidden, start = [], [], 0
    while start < len(TOKENS):
        chunk = TOKENS[start : start + sizes[len(logits) % len(sizes)]]
        output = runner.forward([PackRow(chunk, start, PAGES, len(chunk))], capture=(0,))
        logits.append(output.logits.clone())
        hidden.append(output.hidden[0].clone())
        start += len(chunk)
    return torch.cat(logits), torch.cat(hidden)


def test_logits_are_close_to_those_in_float32(folder):
    expected, _ = _run(load_model(folder, dtype="float32", device=CPU), fused=True)
    loaded = load_model(folder, dtype="bfloat16", device=CPU)
    for fused in (True, False):  # in this order: what the modules run on is packed afresh
        found, _ = _run(loaded, fused=fused)
        assert (found - expected).norm() < 0.05 * expected.norm()  # random weights pass errors on
        assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


class _Rounding(CPUBackend):
    """Runs module by module in float32, over rows rounded to bfloat16."""

    def fuse(self, tensors):
        return None

    def prepare(self, model):
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda module, args: (args[0].bfloat16().float(),))
        return 1


@compiled
def test_only_the_rows_of_products_and_the_kv_are_rounded(folder):
    loaded, wide = (load_model(folder, dtype=dtype, device=CPU) for dtype in ("bfloat16", "float32"))
    weights = loaded.model.state_dict()
    for name, tensor in wide.model.state_dict().items():
        tensor.copy_(weights[name])
    outputs = []
    for model, backend in ((loaded.model, CPUBackend()), (wide.model, _Rounding())):
        storage = _storage(loaded)
        outputs.append(ModelRunner(model, backend, storage).forward([PackRow(TOKENS[:60], 0, PAGES, 60)], capture=(0,)))
    found, expected = outputs
    assert (found.hidden[0] - expected.hidden[0]).norm() < 1e-3 * expected.hidden[0].norm()  # a sum's order may turn a rounding
    assert (found.logits - expected.logits).norm() < 1e-2 * expected.logits.norm()


@compiled
def test_weights_are_used_where_they_lie(folder):
    loaded = load_model(folder, dtype="bfloat16", device=CPU)
    model, runner = loaded.model, ModelRunner(loaded.model, CPUBackend(), _storage(loaded))
    assert runner.row_tile == 1 and isinstance(model.lm_head, torch.nn.Linear)
    tensors = decoder_tensors(model)
    assert tensors is not None and tensors.embedding is not None
    assert tensors.layers[1].down.weight.data_ptr() == model.model.layers[1].mlp.down_proj.weight.data_ptr()
    assert tensors.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert (tensors.embedding.data_ptr() == tensors.head.weight.data_ptr()) == model.config.tie_word_embeddings


@compiled
def test_a_row_is_the_same_bits_whatever_the_other_rows_are(runner):
    alone = _in_chunks(runner, [1])
    assert alone[0].abs().max() > 1.0
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for sizes in ([2], [3], [4, 5], [6, 7], [8], [11, 1, 13], [16, 2], [70], [90]):
                for found, expected in zip(_in_chunks(runner, sizes), alone, strict=True):
                    assert torch.equal(found, expected), (count, sizes)
    finally:
        torch.set_num_threads(threads)


@compiled
def test_nodes_of_a_tree_and_rows_of_a_batch_get_the_bits_of_plain_decoding(runner):
    logits, _ = _in_chunks(runner, [1])
    wrong = [(token + 1) % 96 for token in TOKENS[21:25]]
    # each right token has a wrong sibling, before or behind it; both hang below the right one
    nodes = [wrong[0], TOKENS[21], TOKENS[22], wrong[1], wrong[2], TOKENS[23], TOKENS[24], wrong[3]]
    tree = PackRow([TOKENS[20], *nodes], 20, PAGES, 9, np.array([-1, -1, 1, 1, 2, 2, 5, 5], dtype=np.int32))
    other = PackRow(TOKENS[:37], 0, np.arange(8, 16, dtype=np.int32), 37)
    found = runner.forward([other, tree]).logits
    assert torch.equal(found[:37], logits[:37])
    assert torch.equal(found[37 + np.array([0, 2, 3, 6, 7])], logits[20:25])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ids_are_those_of_each_prompt_alone_without_drafts(folder, temperature):
    prompts = [[5, 6, 7, 5, 6, 7, 5], list(range(3, 40)), [9]]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
    alone = LLM(folder, dtype="bfloat16", num_pages=64, max_num_seqs=1)
    expected = [alone.generate([prompt], params)[0].token_ids for prompt in prompts]
    for drafter in ("ngram", f"model:{folder}"):
        together = LLM(folder, dtype="bfloat16", num_pages=64, max_num_seqs=3, drafter=drafter, draft_budget="all", prefill_chunk=8)
        outputs = together.generate(prompts, params)
        assert [output.token_ids for output in outputs] == expected
        stats = [output.stats for output in outputs]
        assert sum(one.drafted for one in stats) > 0
        if drafter != "ngram":  # the model drafts for itself, by the same arithmetic
            assert all(one.accepted == one.drafted for one in stats)


def test_without_the_instruction_it_runs_layer_by_layer_and_says_so(llama_folder, monkeypatch):
    monkeypatch.setattr("specdec.kernels.decoder_ops.bfloat16_is_fast", lambda: False)
    loaded = load_model(str(llama_folder), dtype="bfloat16", device=CPU)
    assert ModelRunner(loaded.model, CPUBackend(), _storage(loaded)).row_tile > 1
    config = inspect_model(str(llama_folder))
    assert "AVX512_BF16" in resolve_precision("bfloat16", config, CPU, bfloat16_fast=lambda: False).reason
    assert "architecture" in resolve_precision("bfloat16", replace(config, head_dim=12), CPU, bfloat16_fast=lambda: True).reason
    assert resolve_precision("bfloat16", config, CPU, bfloat16_fast=lambda: True).reason == ""
    assert resolve_precision("float32", config, CPU, bfloat16_fast=lambda: False).reason == ""
    assert resolve_precision("bfloat16", config, torch.device("cuda"), bfloat16_fast=lambda: False).reason == ""
