"""What is wrong with a checkpoint is said, with the tensor and the file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import ConfigError, ModelError, UnknownArchitectureError, WeightError
from specdec.models import inspect_model, load_model, load_tokenizer, resolve_precision, resolve_source

CPU = torch.device("cpu")
NAME = "model.layers.1.self_attn.k_proj.weight"


def _change(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def _change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _set(name, value):
    def change(tensors):
        tensors[name].view(-1)[5] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NAME), [NAME, "missing"]),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}), ["model.layers.3.mlp.up_proj.weight", "not part"]),
        (lambda t: t.update({NAME: t[NAME][:-1].clone()}), [NAME, "[32, 64]", "[31, 64]"]),
        (lambda t: t.update({NAME: t[NAME].to(torch.int32)}), [NAME, "int32"]),
        (_set(NAME, float("nan")), [NAME, "NaN"]),
        (_set("model.norm.weight", float("-inf")), ["model.norm.weight", "infinite"]),
    ],
    ids=["missing", "extra", "misshapen", "integer", "nan", "infinite"],
)
def test_a_bad_tensor_is_named(llama_folder, change, words):
    _change(llama_folder, change)
    with pytest.raises(WeightError) as caught:
        load_model(str(llama_folder), dtype="float32", device=CPU)
    for word in [*words, "model.safetensors"]:
        assert word in str(caught.value)


def test_harmless_extras_are_ignored(llama_folder):
    _change(llama_folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load_model(str(llama_folder), dtype="float32", device=CPU)


def test_a_head_beside_tied_embeddings_is_ignored(reference_model, tmp_path):
    reference_model("LlamaConfig", tie_word_embeddings=True).save_pretrained(tmp_path)
    _change(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(96, 64)}))
    model = load_model(str(tmp_path), dtype="float32", device=CPU).model
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.any()


@pytest.mark.parametrize("keep", [4, 1000, -1])
def test_a_file_cut_short_is_named(llama_folder, keep):
    path = llama_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightError, match=r"model\.safetensors.*cut short"):
        load_model(str(llama_folder), dtype="float32", device=CPU)


def test_a_missing_shard_is_named(reference_model, tmp_path):
    reference_model("LlamaConfig").save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightError, match=shard.name):
        load_model(str(tmp_path), dtype="float32", device=CPU)


def test_a_shard_without_its_tensor_is_named(reference_model, tmp_path):
    reference_model("LlamaConfig").save_pretrained(tmp_path, max_shard_size="50KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    wrong = next(shard for shard in index["weight_map"].values() if shard != index["weight_map"][NAME])
    index["weight_map"][NAME] = wrong
    path.write_text(json.dumps(index))
    with pytest.raises(WeightError) as caught:
        load_model(str(tmp_path), dtype="float32", device=CPU)
    assert NAME in str(caught.value) and wrong in str(caught.value)


def test_a_folder_without_weights_is_named(llama_folder):
    (llama_folder / "model.safetensors").unlink()
    inspect_model(str(llama_folder))  # reads the config only
    with pytest.raises(ModelError, match="holds neither"):
        load_model(str(llama_folder), dtype="float32", device=CPU)


@pytest.mark.parametrize(
    ("values", "error", "word"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, UnknownArchitectureError, "MambaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, UnknownArchitectureError, "LlamaForSequenceClassification"),
        ({"model_type": "never_heard_of", "architectures": None}, UnknownArchitectureError, "never_heard_of"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ModelError, "gptq"),
        ({"hidden_size": "many"}, ModelError, r"config\.json"),
    ],
)
def test_an_unusable_config_is_refused_before_weights_load(llama_folder, values, error, word):
    (llama_folder / "model.safetensors").unlink()
    _change_config(llama_folder, **values)
    with pytest.raises(error, match=word):
        load_model(str(llama_folder), device=CPU)


def test_a_broken_config_is_named(llama_folder):
    (llama_folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        inspect_model(str(llama_folder))


def test_sources_that_are_not_there(tmp_path, cache):
    with pytest.raises(ModelError, match="make setup"):
        resolve_source("demo")
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_source(str(tmp_path))
    for source in (str(tmp_path / "none"), "./none", "none.gguf", "not/an/id"):
        with pytest.raises(ModelError, match="no such file or folder"):
            resolve_source(source)


def test_a_hub_id_that_cannot_be_fetched_is_named(cache, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"nobody/nothing: .*model hub"):
        resolve_source("nobody/nothing")


def test_generation_config_overrides_the_end_tokens_of_the_config(llama_folder):
    (llama_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_model(str(llama_folder), dtype="float32", device=CPU).eos_token_ids == {5, 7}
    (llama_folder / "generation_config.json").write_text("{}")
    assert load_model(str(llama_folder), dtype="float32", device=CPU).eos_token_ids == {2}


def test_a_folder_tokenizer_is_loaded_and_its_end_token_counts(llama_folder):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "b": 1, "</s>": 3}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])), eos_token="</s>", chat_template="hi")
    tokenizer.save_pretrained(llama_folder)
    loaded = load_model(str(llama_folder), dtype="float32", device=CPU)
    assert loaded.eos_token_ids == {2, 3}
    assert loaded.tokenizer is not None and loaded.tokenizer("ab").input_ids == [0, 1]
    alone = load_tokenizer(str(llama_folder))
    assert alone is not None and alone.chat_template == "hi"


def test_dtypes(llama_folder):
    config = inspect_model(str(llama_folder))
    for asked in ("bfloat16", torch.bfloat16):
        precision = resolve_precision(asked, config, CPU)
        assert (precision.weights, precision.dtype, precision.kv_dtype) == ("bfloat16", torch.bfloat16, torch.bfloat16)
    precision = resolve_precision("int8", config, CPU)
    assert (precision.weights, precision.dtype, precision.kv_dtype, precision.reason) == ("int8", torch.float32, torch.bfloat16, "")
    for wrong in ("best", torch.int64):
        with pytest.raises(ConfigError, match="dtype must be auto, int8"):
            resolve_precision(wrong, config, CPU)
    with pytest.raises(ConfigError, match="int8 runs on the CPU only, got device cuda"):
        resolve_precision("int8", config, torch.device("cuda"))


def test_auto_takes_int8_where_that_is_fast_and_says_why(llama_folder):
    config = inspect_model(str(llama_folder))
    fast = resolve_precision("auto", config, CPU, lambda: True)
    assert fast.weights == "int8" and fast.reason == "fastest here; --dtype float32 for the checkpoint's own precision"
    kept = resolve_precision("auto", config, CPU, lambda: True, {"lm_head"})
    assert (kept.weights, kept.four_bit) == ("int4", {"lm_head"}) and "own 4-bit weights" in kept.reason
    slow = resolve_precision("auto", config, CPU, lambda: False, {"lm_head"})
    assert slow.dtype == torch.float32 and "compiled kernels" in slow.reason  # as the checkpoint is
    other = resolve_precision("auto", replace(config, head_dim=12), CPU, lambda: True)
    assert other.dtype == torch.float32 and "architecture" in other.reason
    device = resolve_precision("auto", replace(config, torch_dtype="float16"), torch.device("cuda"), lambda: True)
    assert device.weights == "bfloat16" and device.reason == ""


def test_weights_of_the_right_dtype_are_mapped_not_copied(llama_folder):
    model = load_model(str(llama_folder), dtype="float32", device=CPU).model
    assert all(not parameter.requires_grad and not parameter.is_meta for parameter in model.parameters())
    with open("/proc/self/maps") as maps:
        assert str(llama_folder / "model.safetensors") in maps.read()
