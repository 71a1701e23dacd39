"""Tiny checkpoints in the Llama format, written in milliseconds: models whose every logit is known, and one that is not.

They are read by any engine that reads a Hugging Face folder. They have no tokenizer: prompts are ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NEVER = -30.0
"""Logit of ids that only fill the vocabulary up."""
TINY_SEED = 0
"""The first seed whose greedy runs from all of `tiny_prompt(n)`, n in `TINY_PROMPT_LENGTHS`, are well conditioned."""
TINY_VOCAB_SIZE = 512
TINY_MAX_LENGTH = 256
TINY_PROMPT_LENGTHS = (1, 2, 3, 15, 16, 17, 33, 64)

_SMALL_HIDDEN = 16

Floats = NDArray[np.float32]


def write_const_checkpoint(folder: str | Path, logits: Sequence[float], max_length: int = 4096) -> Path:
    """F-CONST: a model whose logits are `logits` after every prompt.

    Attention and MLP add nothing, every token has the same embedding, and the final norm makes it (4, 0, ..., 0), so
    that column 0 of `lm_head` is a quarter of the logits.

    Args:
        folder: is made if it does not exist.
        logits: for ids 0, 1, ...; the vocabulary is filled up to 16 ids with `NEVER`. Write -30 for "never", since
            weights must be finite.
        max_length: the model's length limit.

    Returns:
        The folder.
    """
    values = _filled(logits, max(_SMALL_HIDDEN, len(logits)))
    embedding = np.zeros((len(values), _SMALL_HIDDEN), dtype=np.float32)
    embedding[:, 0] = 1.0
    head = np.zeros_like(embedding)
    head[:, 0] = values / np.sqrt(_SMALL_HIDDEN)
    return _write_transparent(folder, embedding, head, max_length)


def write_bigram_checkpoint(folder: str | Path, table: Sequence[Sequence[float]], max_length: int = 4096) -> Path:
    """F-BIGRAM: a model whose logits depend on the last token only: `table[j]` after token j.

    Args:
        folder: is made if it does not exist.
        table: [v, v] logits; the vocabulary is filled up to a multiple of 16 ids with `NEVER`.
        max_length: the model's length limit.

    Returns:
        The folder.

    Raises:
        ValueError: the table is not square.
    """
    given = np.asarray(table, dtype=np.float32)
    if given.ndim != 2 or given.shape[0] != given.shape[1]:
        raise ValueError(f"table must be square, one row of logits per token, got shape {given.shape}")
    size = -(-len(given) // _SMALL_HIDDEN) * _SMALL_HIDDEN
    logits = np.full((size, size), NEVER, dtype=np.float32)
    logits[: len(given), : len(given)] = given
    head = np.ascontiguousarray(logits.T) / np.float32(np.sqrt(size))
    return _write_transparent(folder, np.eye(size, dtype=np.float32), head, max_length)


def write_tiny_checkpoint(folder: str | Path, seed: int | None = None, max_length: int = TINY_MAX_LENGTH) -> Path:
    """F-TINY: a random Llama that attends: 2 layers, hidden 64, 4 heads on 2 KV heads, 512 ids, float32, length 256.

    With the default seed, each of the 64-token greedy runs from `tiny_prompt(n)`, n in `TINY_PROMPT_LENGTHS`, has a
    top-2 margin of at least 1e-3 at every token, so that rounding cannot change it, and at least 20 distinct ids.

    Args:
        folder: is made if it does not exist.
        seed: of the weights; None takes the one described above.
        max_length: the model's length limit; the weights do not depend on it.

    Returns:
        The folder.
    """
    # RandomState, because its stream is frozen for good
    random = np.random.RandomState(TINY_SEED if seed is None else seed)

    def normal(*shape: int) -> Floats:
        return (0.2 * random.standard_normal(shape)).astype(np.float32)

    hidden, inner, kv, layers = 64, 128, 32, 2
    tensors = {"model.embed_tokens.weight": normal(TINY_VOCAB_SIZE, hidden), "model.norm.weight": np.ones(hidden, dtype=np.float32)}
    for layer in range(layers):
        attention = {"q": normal(hidden, hidden), "k": normal(kv, hidden), "v": normal(kv, hidden), "o": normal(hidden, hidden)}
        mlp = {"gate": normal(inner, hidden), "up": normal(inner, hidden), "down": normal(hidden, inner)}
        tensors |= _layer(layer, hidden, attention, mlp)
    tensors["lm_head.weight"] = normal(TINY_VOCAB_SIZE, hidden)
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _write(folder, tensors, {**shape, "head_dim": 16, "vocab_size": TINY_VOCAB_SIZE, "max_position_embeddings": max_length})


def tiny_prompt(length: int, seed: int = 0) -> list[int]:
    """`length` ids below `TINY_VOCAB_SIZE`, the same ones every time."""
    ids: list[int] = np.random.RandomState(1000 + seed).randint(0, TINY_VOCAB_SIZE, size=length).tolist()
    return ids


def _filled(logits: Sequence[float], size: int) -> Floats:
    values = np.full(size, NEVER, dtype=np.float32)
    values[: len(logits)] = logits
    return values


def _write_transparent(folder: str | Path, embedding: Floats, head: Floats, max_length: int) -> Path:
    """A one-layer model that hands the embedding through unchanged."""
    hidden = embedding.shape[1]
    square = np.zeros((hidden, hidden), dtype=np.float32)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(hidden, dtype=np.float32), "lm_head.weight": head}
    tensors |= _layer(0, hidden, dict.fromkeys("qkvo", square), dict.fromkeys(("gate", "up", "down"), square))
    shape = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    return _write(folder, tensors, {**shape, "head_dim": hidden, "vocab_size": len(embedding), "max_position_embeddings": max_length})


def _layer(layer: int, hidden: int, attention: dict[str, Floats], mlp: dict[str, Floats]) -> dict[str, Floats]:
    prefix = f"model.layers.{layer}"
    ones = np.ones(hidden, dtype=np.float32)
    return {
        **{f"{prefix}.self_attn.{name}_proj.weight": weight for name, weight in attention.items()},
        **{f"{prefix}.mlp.{name}_proj.weight": weight for name, weight in mlp.items()},
        f"{prefix}.input_layernorm.weight": ones,
        f"{prefix}.post_attention_layernorm.weight": ones,
    }


def _write(folder: str | Path, tensors: dict[str, Floats], config: dict[str, int]) -> Path:
    from safetensors.numpy import save_file

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    # one allocation per name, since the file format refuses shared ones
    save_file({name: tensor.copy() for name, tensor in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-12,  # too small to change a norm in float32, so that the logits are exact
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps({**fixed, **config}, indent=1), encoding="utf-8")
    return path
