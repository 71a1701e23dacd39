"""Times the choice of tokens on the CPU: milliseconds per call, median and minimum.

    python benchmarks/choice.py [--model PATH] [--repeats N]

Rows are those of a verify of so many nodes, with a choice at each; a step chooses only where its walk can reach, see
host_step.py. With --model they are a model's own logits over this file's text, otherwise normal ones as wide as a model's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: spinning threads disturb each other

import numpy as np
import torch
from torch import Tensor

from specdec.backend.base import ChoiceBatch
from specdec.backend.cpu import CPUBackend

ROWS = (1, 4, 16)
CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "plain, T 0.6": {"temperature": 0.6},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "typical_p 0.9": {"typical_p": 0.9},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="GGUF file, folder or hub id; may be given more than once")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    inputs = {name: model_logits(name) for name in options.model} or {
        f"normal, {size}": torch.randn(max(ROWS), size, generator=torch.Generator().manual_seed(0)) * 2.5 for size in (49152, 151936)
    }
    for name, logits in inputs.items():
        print(f"\n{name}: vocabulary {logits.shape[1]}, {options.threads} threads, ms per call as median / minimum")
        print(f"{'':22}" + "".join(f"{f'{rows} rows':>18}" for rows in ROWS))
        for case, parameters in CASES.items():
            timings = [time_choice(logits[:rows], parameters, options.repeats) for rows in ROWS]
            print(f"{case:22}" + "".join(f"{f'{median:.3f} / {least:.3f}':>18}" for median, least in timings))


def model_logits(source: str) -> Tensor:
    """float32 [16, vocabulary]: a model's logits at 16 places of this file."""
    from specdec.kv_manager.storage import KVStorage
    from specdec.models import load_model
    from specdec.pack import PackRow
    from specdec.runner import ModelRunner

    backend = CPUBackend()
    loaded = load_model(source, device=backend.device)
    assert loaded.tokenizer is not None
    tokens = loaded.tokenizer.encode(Path(__file__).read_text("utf-8"))[:256]
    config = loaded.config
    storage = KVStorage(config.num_layers, 16, 16, config.num_kv_heads, config.head_dim, loaded.kv_dtype)
    output = ModelRunner(loaded.model, backend, storage).forward([PackRow(tokens, 0, np.arange(16, dtype=np.int32), len(tokens))])
    return output.logits[7::16].clone()


def time_choice(logits: Tensor, parameters: dict[str, float], repeats: int) -> tuple[float, float]:
    """Median and minimum milliseconds of one call."""
    rows = len(logits)
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    columns = {
        name: torch.full((rows,), parameters.get(name, value), dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in off.items()
    }
    backend = CPUBackend()
    batches = [ChoiceBatch(seeds=torch.full((rows,), i), positions=torch.arange(rows), **columns) for i in range(repeats)]
    backend.choose(logits, batches[0])
    return _milliseconds([lambda batch=batch: backend.choose(logits, batch) for batch in batches])


def _milliseconds(calls: list) -> tuple[float, float]:
    timings = []
    for call in calls:
        start = time.perf_counter()
        call()
        timings.append((time.perf_counter() - start) * 1000)
    return statistics.median(timings), min(timings)


if __name__ == "__main__":
    main()
