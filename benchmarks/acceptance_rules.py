"""Acceptance lengths of the verification rules with a draft model that samples: tokens emitted per verify, pooled.

    python benchmarks/acceptance_rules.py --target T.gguf --draft D.gguf --prompts spec_bench.jsonl

For chains and trees, and for every temperature: each rule with drafts that are drawn as the rule wants them, and the
coupled rule with the draft model's most probable tokens. Prompts are spread evenly over the file; only first turns.
Under `rejection` and `traversal` the text depends on the draft, so that their columns carry the noise of other texts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: spinning threads disturb each other

import torch

from specdec.eval.datasets import spread_prompts
from specdec.llm import LLM, GenerationOutput
from specdec.request import VERIFY_RULES, SamplingParams

SHAPES = {"chain of 4": "depth=4", "tree of 16": "tree=4-1-1-1"}


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    shapes = {f"tree {tree}": f"tree={tree}" for tree in options.tree} or SHAPES
    lengths: dict[tuple[str, float, str], float] = {}
    for shape, setting in shapes.items():
        for drawing, rules in (("", VERIFY_RULES), (",greedy=true", ("coupled",))):
            llm = LLM(
                options.target,
                drafter=f"model:{options.draft}({setting}{drawing})",
                max_num_seqs=options.batch,
                max_model_len=options.max_model_len,
                prefix_cache=True,  # the prompts are the same for every rule
                draft_budget="all",
                progress=lambda line: print(line, file=sys.stderr),
            )
            prompts = spread_prompts(llm, options.prompts, options.limit, options.max_model_len - options.max_tokens)
            for temperature in options.temperature:
                for rule in rules:
                    column = "greedy drafts" if drawing else rule
                    lengths[shape, temperature, column] = measure(llm, prompts, temperature, rule, options.max_tokens, f"{shape}, {column}")
            llm.close()
            del llm
    print_table(lengths, list(shapes), options.temperature)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="GGUF file, folder or hub id")
    parser.add_argument("--draft", required=True, help="a smaller model with the same tokenizer")
    parser.add_argument("--prompts", required=True, type=Path, help="JSON lines of {id, category, turns}")
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=128, help="per prompt")
    parser.add_argument("--max-model-len", type=int, default=2048, help="longer prompts are left out")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--tree", nargs="+", default=[], help="children per level, in place of a chain of 4 and 4-1-1-1")
    parser.add_argument("--batch", type=int, default=4, help="requests at once")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def measure(llm: LLM, prompts: list[list[int]], temperature: float, rule: str, max_tokens: int, title: str) -> float:
    start = time.perf_counter()
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, verify_rule=rule) for seed in range(len(prompts))]
    outputs: list[GenerationOutput] = llm.generate(prompts, params)
    emitted, verifies, drafted, accepted = (
        sum(getattr(output.stats, name) for output in outputs) for name in ("emitted", "verifies", "drafted", "accepted")
    )
    seconds = time.perf_counter() - start
    print(
        f"{title}, T = {temperature}: {emitted} tokens in {verifies} verifies, {accepted} of {drafted} drafted, {seconds:.0f} s",
        file=sys.stderr,
    )
    return emitted / verifies


def print_table(lengths: dict[tuple[str, float, str], float], shapes: list[str], temperatures: list[float]) -> None:
    columns = [*VERIFY_RULES, "greedy drafts"]
    print(f"| draft | T | {' | '.join(columns)} | coupled / traversal | coupled / greedy drafts |")
    print("|---|---|" + "---|" * (len(columns) + 2))
    for shape in shapes:
        for temperature in temperatures:
            row = {column: lengths[shape, temperature, column] for column in columns}
            ratios = (row["coupled"] / row["traversal"], row["coupled"] / row["greedy drafts"])
            cells = [shape, str(temperature), *(f"{value:.3f}" for value in (*row.values(), *ratios))]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
