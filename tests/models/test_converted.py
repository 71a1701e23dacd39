"""The cache of converted weights: used when whole, made again when damaged, harmless when interrupted or shared."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.cache import list_cache
from specdec.errors import WeightError
from specdec.models import converted, load_model

CPU = torch.device("cpu")


@pytest.fixture(params=["GGUF in float32", "GGUF in int8", "safetensors in int8"])
def source(request, reference_model, gguf_of, cache, tmp_path):
    """A model and the dtype to load it in."""
    kind, _, dtype = request.param.split()
    path = tmp_path / "model.gguf"
    if kind == "GGUF":
        gguf_of(path, reference_model("LlamaConfig"), "llama", {"ffn_up": "Q8_0"})
    else:
        reference_model("LlamaConfig").save_pretrained(path)
    return path, dtype


def _load(source):
    path, dtype = source
    said: list[str] = []
    model = load_model(str(path), dtype=dtype, device=CPU, progress=said.append).model
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, " / ".join(said)


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_second_load_converts_nothing(source, cache):
    first, said = _load(source)
    assert "converting model.gguf" in said
    files = list(cache.rglob("*.safetensors"))
    assert len(files) == 1 and load_file(files[0]).keys() == first.keys()
    second, said = _load(source)
    assert "converting" not in said and _same(first, second)


def test_a_small_model_is_converted_every_time(source, cache, monkeypatch):
    first, _ = _load(source)
    shutil.rmtree(cache)
    monkeypatch.setattr(converted, "LEAST_KEPT_BYTES", 1 << 20)
    again, _ = _load(source)
    assert not cache.exists() and _same(first, again)


def test_dtype_and_file_identity_make_the_key(source, cache):
    path, dtype = source
    _load(source)
    _load((path, {"float32": "int8", "int8": "bfloat16"}[dtype]))
    kept = len(list(cache.rglob("*.safetensors")))
    assert kept == (2 if path.is_file() else 1)  # floats of a folder are used as they lie there
    os.utime(path if path.is_file() else path / "model.safetensors", ns=(0, 12345))
    _, said = _load(source)
    assert "converting" in said and len(list(cache.rglob("*.safetensors"))) == kept + 1


def test_the_cache_tells_what_an_entry_was_made_from(source, cache):
    path, dtype = source
    _load(source)
    (entry,) = list_cache()
    assert entry.source == f"{path.resolve()} ({dtype})" and entry.replaceable and not entry.partial


def test_tensors_lie_on_cache_lines_and_blocks_side_by_side(source, cache):
    _load(source)
    (file,) = cache.rglob("*.safetensors")
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
    assert all(start % 64 == 0 for start in starts.values())
    blocks = [starts[name] for name, entry in header.items() if entry["dtype"] == "U8"]
    others = [starts[name] for name, entry in header.items() if entry["dtype"] != "U8"]
    assert not blocks or max(blocks) < min(others)


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "missing tensor", "wrong shape"])
def test_a_damaged_cache_file_is_made_again(source, cache, damage):
    first, _ = _load(source)
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
    second, said = _load(source)
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


def test_a_writer_that_fails_leaves_nothing(source, cache, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(converted, "_convert", fail)
        with pytest.raises(KeyboardInterrupt):
            _load(source)
    assert not [file for file in cache.rglob("*") if file.is_file()]
    _load(source)


def test_what_a_killed_writer_left_is_removed_and_what_another_writes_is_not(source, cache):
    _load(source)
    (file,) = cache.rglob("*.safetensors")
    file.unlink()
    folder = file.parent
    old, new, held = (folder / f"writing-{name}" for name in ("old", "new", "held"))
    for path in (old, new, held):
        path.write_bytes(b"x")
    for path in (old, held):
        os.utime(path, (time.time() - 120,) * 2)
    with held.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        _load(source)
    assert not old.exists() and new.exists() and held.exists()


def test_concurrent_loads_agree(source, cache):
    results = []
    threads = [threading.Thread(target=lambda: results.append(_load(source)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(_same(results[0], other) for other in results)
    assert sorted(file.name for file in cache.rglob("*") if file.is_file()) == ["model.safetensors", "source.json"]


def test_a_full_or_read_only_disk_costs_the_cache_only(source, cache, monkeypatch):
    first, _ = _load(source)
    shutil.rmtree(cache)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(converted, "_reserve", full)
    second, said = _load(source)
    assert "No space left" in said and _same(first, second)
    assert not [file for file in cache.rglob("*") if file.is_file()]
