"""A draft model that scores the first token ids only: the same logits, fewer of them, from the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.backend.cpu import CPUBackend
from specdec.kv_manager.storage import KVStorage
from specdec.models import load_model
from specdec.models.shortlist import shorten_vocabulary
from specdec.pack import PackRow
from specdec.runner import ModelRunner

TOKENS = [5, 95, 40, 7, 90, 33]  # most of them beyond the shortest vocabulary
DTYPES = ("float32", "bfloat16", "int8")


def _logits(loaded):
    config = loaded.config
    storage = KVStorage(config.num_layers, 1, 16, config.num_kv_heads, config.head_dim, loaded.kv_dtype)
    runner = ModelRunner(loaded.model, CPUBackend(), storage)
    return runner.forward([PackRow(TOKENS, 0, np.zeros(1, dtype=np.int32), len(TOKENS))]).logits.clone()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_ids_keep_their_logits(reference_model, cache, tmp_path, dtype, tied):
    reference_model("LlamaConfig", tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    whole = _logits(load_model(str(tmp_path / "model"), dtype=dtype, device=torch.device("cpu")))
    for size in (1, 31, 32, 50, 96, 500):
        loaded = load_model(str(tmp_path / "model"), dtype=dtype, device=torch.device("cpu"))
        shorten_vocabulary(loaded.model, size)
        torch.testing.assert_close(_logits(loaded), whole[:, :size])
