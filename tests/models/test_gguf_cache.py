"""The cache of converted weights: used when whole, made again when damaged, harmless when interrupted or shared."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import WeightError
from specdec.models import gguf_weights, load_model

CPU = torch.device("cpu")


@pytest.fixture
def path(reference_model, gguf_of, cache, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_of(path, reference_model("LlamaConfig"), "llama", {"ffn_up": "Q8_0"})
    return path


def _load(path, dtype="float32"):
    said: list[str] = []
    model = load_model(str(path), dtype=dtype, device=CPU, progress=said.append).model
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, " / ".join(said)


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_second_load_converts_nothing(path, cache):
    first, said = _load(path)
    assert "converting model.gguf" in said
    files = list(cache.rglob("*.safetensors"))
    assert len(files) == 1 and load_file(files[0]).keys() == first.keys()
    second, said = _load(path)
    assert "converting" not in said and _same(first, second)


def test_dtype_and_file_identity_make_the_key(path, cache):
    _load(path)
    _load(path, "bfloat16")
    assert len(list(cache.rglob("*.safetensors"))) == 2
    os.utime(path, ns=(0, 12345))
    _, said = _load(path)
    assert "converting" in said


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "missing tensor", "wrong shape"])
def test_a_damaged_cache_file_is_made_again(path, cache, damage):
    first, _ = _load(path)
    (file,) = cache.rglob("*.safetensors")
    whole = file.read_bytes()
    if damage in ("missing tensor", "wrong shape"):
        tensors = load_file(file)
        norm = tensors.pop("model.norm.weight")
        save_file(tensors if damage == "missing tensor" else tensors | {"model.norm.weight": norm[:3].clone()}, file)
    else:
        broken = {"cut": whole[:-100], "header": b"\xff" * 16 + whole[16:], "empty": b""}[damage]
        file.unlink()  # the first load still maps it
        file.write_bytes(broken)
    second, said = _load(path)
    assert "damaged" in said and "converting" in said and _same(first, second)
    assert file.read_bytes() == whole


def test_a_fault_of_the_gguf_file_is_not_blamed_on_the_cache(reference_model, gguf_of, cache, tmp_path):
    reference = reference_model("LlamaConfig")
    state = reference.state_dict()
    del state["model.norm.weight"]
    reference.state_dict = lambda: state
    gguf_of(tmp_path / "model.gguf", reference, "llama")
    said: list[str] = []
    with pytest.raises(WeightError, match=r"model\.norm\.weight"):
        load_model(str(tmp_path / "model.gguf"), dtype="float32", device=CPU, progress=said.append)
    assert not any("damaged" in text for text in said)


def test_a_writer_that_fails_leaves_nothing(path, cache, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_weights, "_fill", fail)
        with pytest.raises(KeyboardInterrupt):
            _load(path)
    assert not [file for file in cache.rglob("*") if file.is_file()]
    _load(path)


def test_what_a_killed_writer_left_is_removed_when_old(path, cache):
    folder = gguf_weights.cached_path(path, torch.float32).parent
    old, new = folder / "writing-old", folder / "writing-new"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (time.time() - 48 * 3600,) * 2)
    _load(path)
    assert not old.exists() and new.exists()


def test_concurrent_loads_agree(path, cache):
    results = []
    threads = [threading.Thread(target=lambda: results.append(_load(path)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(_same(results[0], other) for other in results)
    assert [file.name for file in cache.rglob("*") if file.is_file()] == ["model.safetensors"]


def test_a_full_or_read_only_disk_costs_the_cache_only(path, cache, monkeypatch):
    first, _ = _load(path)
    (file,) = cache.rglob("*.safetensors")
    file.unlink()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_weights, "_reserve", full)
    second, said = _load(path)
    assert "No space left" in said and _same(first, second)
    assert not [file for file in cache.rglob("*") if file.is_file()]
