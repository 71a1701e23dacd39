"""Perplexity of real text, one precision after the other: what a quantisation scheme costs. Runs the engine's own forward."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.backend import create_backend
from specdec.errors import ConfigError
from specdec.eval.machine import describe_machine
from specdec.eval.tables import align
from specdec.kv_manager.storage import KVStorage
from specdec.models import LoadedModel, load_model
from specdec.pack import PackRow
from specdec.runner import ModelRunner

PAGE_SIZE = 16
_STEP = 128  # tokens forwarded at once: bounds the memory of their logits


@dataclass(frozen=True)
class PerplexityResult:
    """What one precision came to.

    Attributes:
        weights: of `LoadedModel`.
        loss: mean negative log-likelihood of a token in nats, by logits in float32.
        tokens: that were predicted.
        seconds: spent on forwards.
    """

    weights: str
    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def read_text(texts: Sequence[Path], data: Sequence[Path], num_bytes: int) -> list[str]:
    """The beginning of each file, all of them together `num_bytes` of UTF-8, shared out evenly.

    Args:
        texts: plain text.
        data: JSON lines, whose text is that of `turns`, or of `prompt` and `completion`.

    Raises:
        ConfigError: a file cannot be read, is not of that form, or is shorter than its share.
    """
    share = num_bytes // (len(texts) + len(data))
    found = [_cut(path, _read(path), share) for path in texts]
    return found + [_cut(path, "\n\n".join(_pieces(path)), share) for path in data]


def run_perplexity(
    model: str, dtypes: Sequence[str], texts: Sequence[str], context: int, say: Callable[[str], None], show: Callable[[str], None]
) -> list[PerplexityResult]:
    """Loads the model in each dtype in turn and scores the texts.

    Args:
        context: tokens of a chunk; every chunk starts afresh, and its first token is not scored.
        say: told what is loaded.
        show: told how far it is.

    Raises:
        ConfigError: the model cannot take such chunks, or has no tokenizer.
    """
    results = []
    for dtype in dtypes:
        loaded = load_model(model, dtype=dtype, device=torch.device("cpu"), progress=say, max_positions=context)
        if context > loaded.config.max_position_embeddings:
            raise ConfigError(f"--context may be at most {loaded.config.max_position_embeddings}, the model's limit, got {context}")
        chunks = _chunks(loaded, texts, context)
        results.append(_score(loaded, chunks, context, show))
        del loaded  # before the next one is loaded: two need not fit
    return results


def build_report(model: str, results: Sequence[PerplexityResult], context: int, files: Sequence[Path], num_bytes: int) -> dict[str, Any]:
    """JSON values. The change is that against the last result."""
    base = results[-1].perplexity
    return {
        "model": model,
        "files": [path.name for path in files],
        "bytes": num_bytes,
        "context": context,
        "machine": describe_machine(),
        "results": [
            {
                "weights": result.weights,
                "perplexity": result.perplexity,
                "change_percent": 100 * (result.perplexity / base - 1),
                "tokens": result.tokens,
                "tokens_per_s": result.tokens / result.seconds,
            }
            for result in results
        ],
    }


def format_table(report: Mapping[str, Any]) -> str:
    """One line per precision."""
    lines = [["weights", "perplexity", "change", "tokens", "tokens/s"]]
    for result in report["results"]:
        change = f"{result['change_percent']:+.2f} %"
        lines.append([result["weights"], f"{result['perplexity']:.4f}", change, str(result["tokens"]), f"{result['tokens_per_s']:.0f}"])
    return align(lines)


def _chunks(loaded: LoadedModel, texts: Sequence[str], context: int) -> list[list[int]]:
    """Token ids, each chunk with the tokens that a text of this model begins with."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{loaded.source} comes without a tokenizer, so that text cannot be scored")
    start = list(tokenizer.encode(""))
    ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    step = context - len(start)
    chunks = [start + ids[at : at + step] for at in range(0, len(ids), step)]
    return [chunk for chunk in chunks if len(chunk) > 1]


def _score(loaded: LoadedModel, chunks: Sequence[Sequence[int]], context: int, show: Callable[[str], None]) -> PerplexityResult:
    config = loaded.config
    num_pages = -(-context // PAGE_SIZE)
    storage = KVStorage(config.num_layers, num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim, loaded.kv_dtype)
    runner = ModelRunner(loaded.model, create_backend("cpu"), storage)
    pages = np.arange(num_pages, dtype=np.int32)
    loss, tokens, start = 0.0, 0, time.perf_counter()
    for index, chunk in enumerate(chunks):
        show(f"{loaded.weights}: chunk {index + 1} of {len(chunks)}")
        for at in range(0, len(chunk) - 1, _STEP):
            part = list(chunk[at : min(at + _STEP, len(chunk) - 1)])
            logits = runner.forward([PackRow(tokens=part, cached=at, pages=pages, num_logits=len(part))]).logits
            following = torch.tensor(chunk[at + 1 : at + 1 + len(part)])
            loss += torch.nn.functional.cross_entropy(logits, following, reduction="sum").item()
            tokens += len(part)
    return PerplexityResult(loaded.weights, loss / tokens, tokens, time.perf_counter() - start)


def _pieces(path: Path) -> list[str]:
    pieces: list[str] = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts = row["turns"] if "turns" in row else [row["prompt"], row["completion"]]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f'{path}:{number}: a row is {{"turns": [text, ...]}} or {{"prompt": text, "completion": text}}') from None
        pieces += texts
    return pieces


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _cut(path: Path, text: str, num_bytes: int) -> str:
    encoded = text.encode()
    if len(encoded) < num_bytes:
        raise ConfigError(f"{path} holds {len(encoded)} bytes of text, {num_bytes} are wanted of it: lower --bytes")
    return encoded[:num_bytes].decode(errors="ignore")
