"""The fixtures are what they claim to be, by transformers' own Llama."""

import json

import numpy as np
import pytest
import torch

from specdec.testing import (
    NEVER,
    TINY_PROMPT_LENGTHS,
    TINY_VOCAB_SIZE,
    tiny_prompt,
    write_bigram_checkpoint,
    write_const_checkpoint,
    write_tiny_checkpoint,
)


def load(folder):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


def test_const_logits_never_depend_on_the_text(tmp_path):
    logits = [2, 1.9, 0.5, 0.4, 0, 0, 0, -1]
    model = load(write_const_checkpoint(tmp_path, logits))
    got = logits_of(model, [5, 0, 15, 3])
    assert got.shape == (4, 16)
    assert np.array_equal(got, np.tile(np.float32([*logits, *[NEVER] * 8]), (4, 1)))


def test_const_takes_a_larger_vocabulary(tmp_path):
    values = np.linspace(-3, 3, 40)
    assert np.allclose(logits_of(load(write_const_checkpoint(tmp_path, values)), [39])[0], values, atol=1e-6)


def test_bigram_logits_depend_on_the_last_token_only(tmp_path):
    table = np.random.RandomState(0).standard_normal((20, 20)).astype(np.float32)
    model = load(write_bigram_checkpoint(tmp_path, table))
    got = logits_of(model, [3, 19, 0, 3])
    assert got.shape == (4, 32)
    assert np.allclose(got[:, :20], table[[3, 19, 0, 3]], atol=1e-5) and np.all(got[:, 20:] < -29)
    assert np.array_equal(got[0], got[3])
    with pytest.raises(ValueError, match="square"):
        write_bigram_checkpoint(tmp_path, table[:3])


def test_tiny_is_well_conditioned(tmp_path):
    model = load(write_tiny_checkpoint(tmp_path))
    for length in TINY_PROMPT_LENGTHS:
        ids = tiny_prompt(length)
        for _ in range(64):
            last = torch.from_numpy(logits_of(model, ids)[-1])
            best, second = last.topk(2).values.tolist()
            assert best - second >= 1e-3
            ids.append(int(last.argmax()))
        assert len(set(ids[length:])) >= 20


def test_tiny_attends(tmp_path):
    model = load(write_tiny_checkpoint(tmp_path))
    assert not np.allclose(logits_of(model, [1, 2, 3])[-1], logits_of(model, [4, 2, 3])[-1], atol=0.1)


def test_seeds_make_other_models_and_the_same_one_again(tmp_path):
    read = [
        (write_tiny_checkpoint(tmp_path / name, seed) / "model.safetensors").read_bytes() for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert read[0] == read[1] != read[2]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["vocab_size"] == TINY_VOCAB_SIZE and config["max_position_embeddings"] == 256


def test_prompts_are_the_same_every_time():
    assert tiny_prompt(5) == tiny_prompt(5) == tiny_prompt(9)[:5] != tiny_prompt(5, seed=1)
    assert all(0 <= token < TINY_VOCAB_SIZE for token in tiny_prompt(200))
