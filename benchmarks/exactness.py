"""Whether a request's ids depend on anything but the request: `off` one by one, against drafters and batches.

    python benchmarks/exactness.py --target T.gguf --draft D.gguf --prompts spec_bench.jsonl --dtype int8 --dtype bfloat16

Prompts are spread evenly over the file; only first turns. The status is 1 where any ids differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: spinning threads disturb each other

import torch

from specdec.eval.datasets import spread_prompts
from specdec.llm import LLM
from specdec.request import SamplingParams


def main() -> int:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    cases = [("off", 1), ("ngram", 1), (f"model:{options.draft}(depth=4)", 1), ("off", 8), ("ngram", 8)]
    print("| dtype | T | drafter | batch | requests | tokens | other ids than off, one by one | acceptance length | tokens/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    failed = False
    for dtype in options.dtype:
        expected: dict[float, list[list[int]]] = {}
        for drafter, batch in cases:
            limits = {"max_num_seqs": batch, "max_model_len": options.max_model_len}
            llm = LLM(options.target, dtype=dtype, drafter=drafter, draft_budget=options.draft_budget, **limits)
            prompts = spread_prompts(llm, options.prompts, options.limit, options.max_model_len - options.max_tokens)
            for temperature in options.temperature:
                start = time.perf_counter()
                outputs = llm.generate(prompts, parameters(temperature, len(prompts), options.max_tokens))
                seconds = time.perf_counter() - start
                ids = [list(output.token_ids) for output in outputs]
                differing = sum(got != wanted for got, wanted in zip(ids, expected.setdefault(temperature, ids), strict=True))
                failed |= differing > 0
                tokens, verifies = sum(map(len, ids)), sum(output.stats.verifies for output in outputs)
                emitted = sum(output.stats.emitted for output in outputs)
                counts = (drafter.partition(":")[0], batch, len(ids), tokens, differing)
                cells = (dtype, temperature, *counts, f"{emitted / verifies:.2f}", f"{tokens / seconds:.1f}")
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
            llm.close()
    return int(failed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="GGUF file, folder or hub id")
    parser.add_argument("--draft", required=True, help="a smaller model with the same tokenizer")
    parser.add_argument("--prompts", required=True, type=Path, help="JSON lines of {id, category, turns}")
    parser.add_argument("--limit", type=int, default=80, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=32, help="per prompt")
    parser.add_argument("--max-model-len", type=int, default=768, help="longer prompts are left out")
    parser.add_argument("--dtype", action="append", default=[], help="may be repeated")
    parser.add_argument("--draft-budget", default="all", help="auto, all or a number of nodes")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.dtype = options.dtype or ["int8", "bfloat16"]
    return options


def parameters(temperature: float, count: int, max_tokens: int) -> Sequence[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens) for seed in range(count)]


if __name__ == "__main__":
    sys.exit(main())
