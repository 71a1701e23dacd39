"""Times what a step costs outside the target's forward: milliseconds per part of the step, medians over steps.

    python benchmarks/host_step.py [--tokenizer MODEL] [--batch N ...] [--steps N]

The target is a table of logits, as wide as a real vocabulary and peaked as a real model's are, that repeats itself often
enough for `ngram` to draft, and breaks the repetition often enough to reject some of it. Its KV has the shape of SmolLM2's, and
it computes no attention. `host` is the step less its forward, `p90` its 90th percentile; `rows` are token rows forwarded and
`emitted` tokens delivered per step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: spinning threads disturb each other

import torch
from torch import Tensor, nn

from specdec import runner as runner_module
from specdec.backend.cpu import CPUBackend
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.memory import MemoryPlan
from specdec.models import LoadedModel, ModelConfig, Precision
from specdec.models.config import Rope
from specdec.request import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STATES = 61
"""Distinct next-token distributions; ids are below it times `SPREAD`."""
SPREAD = 97
PEAK = 14.0
BREAK = 7
PROMPT = 128
LENGTH = 2304
"""Tokens that a request may have."""
PARTS = ("plan", "reserve", "propose", "trim", "pack", "upload", "choose", "append", "commit", "observe", "finish")
FORWARD = "forward"


def state_at(tokens: Tensor, positions: Tensor) -> Tensor:
    """Which distribution follows a token: its own, and at a break one of three."""
    return (tokens // SPREAD + 20 * (positions % BREAK == 0) * (positions // BREAK % 3)) % STATES


def make_prompt(model: TableModel, first: int) -> list[int]:
    """What the model would have said itself."""
    tokens = [first * SPREAD]
    while len(tokens) < PROMPT:
        state = state_at(torch.tensor(tokens[-1]), torch.tensor(len(tokens) - 1))
        tokens.append(int(model.table[state].argmax()))
    return tokens


class TableModel(nn.Module):
    """Stands in for a decoder: a distribution of the next token per last token, another one at every `BREAK`th position."""

    attention_specs = ()

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.config, self.lm_head = None, nn.Identity()  # nothing here that a backend could make faster
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(STATES, vocab_size, generator=generator) * 2.5
        self.table[range(STATES), [(7 * state + 3) % STATES * SPREAD for state in range(STATES)]] = PEAK
        self.kept = torch.empty(0)  # logits of the last step: fresh memory would be given back to the system within the step

    def forward(self, tokens: Tensor, positions: Tensor, _attend: object, _capture: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        return state_at(tokens, positions)[:, None], {}

    def logits(self, hidden: Tensor) -> Tensor:
        rows = hidden[:, 0]
        if len(self.kept) < len(rows):
            self.kept = self.table.new_empty(len(rows), self.table.shape[1])
        return torch.index_select(self.table, 0, rows, out=self.kept[: len(rows)])


class Stopwatch:
    """Seconds per part of the current step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def wrap(self, owner: Any, method: str, part: str) -> None:  # any object with such a method
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = inner(*args, **kwargs)
            spent = self.steps[-1]
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - start
            return result

        setattr(owner, method, timed)


def make_engine(vocab_size: int, batch: int, drafter: str, tokenizer: PreTrainedTokenizerBase | None) -> Engine:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        windows=(0,) * 30,
        ropes=(Rope((1.0,) * 32),),
        layer_ropes=(0,) * 30,
        attention_scale=0.125,
    )
    target = LoadedModel(TableModel(vocab_size), config, tokenizer, frozenset(), "table", Precision.of(torch.bfloat16))  # type: ignore[arg-type]  # a stand-in
    options = EngineConfig(model="table", drafter=drafter, max_num_seqs=batch, max_batch_tokens=max(512, 32 * batch))
    memory = MemoryPlan((), LENGTH * batch // options.page_size, options.page_size, LENGTH, 0)
    engine = Engine(options, target, CPUBackend(), memory)
    for pool in (engine.target.storage.keys, engine.target.storage.values):
        pool.zero_()  # as a forward would have: untouched memory costs a page fault
    return engine


def run_case(engine: Engine, batch: int, temperature: float, steps: int) -> list[dict[str, float]]:
    """Seconds per part, one entry for every step in which all requests decode."""
    watch = Stopwatch()
    parts = [
        *((engine.scheduler, "plan", "plan"), (engine.kv, "reserve", "reserve"), (engine.drafters, "propose", "propose")),
        *((engine.verifier, "shapes", "trim"), (engine.scheduler, "trim", "trim"), (engine.target, "forward", FORWARD)),
        *((engine.target.backend, "upload", "upload"), (engine.verifier, "accept", "choose"), (engine.outputs, "append", "append")),
        *((engine.kv, "commit", "commit"), (engine.drafters, "observe", "observe"), (engine.scheduler, "finish", "finish")),
        *((runner_module, "pack", "pack"),),
    ]
    pack = runner_module.pack
    for owner, method, part in parts:
        watch.wrap(owner, method, part)
    for number in range(batch):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=LENGTH - PROMPT)
        engine.add(make_prompt(engine.target.model, number), params)
    timed: list[dict[str, float]] = []
    warm, drafted = 20, 0
    while len(timed) < steps + warm:
        watch.steps.append({})
        start = time.perf_counter()
        events = engine.step()
        spent = watch.steps[-1]
        spent["step"] = time.perf_counter() - start
        spent["rows"] = batch + sum(event.stats.drafted for event in events) - drafted
        drafted += spent["rows"] - batch
        spent["emitted"] = sum(len(event.token_ids) for event in events)
        if len(events) == batch and not engine.scheduler.waiting:
            timed.append(spent)
    runner_module.pack = pack
    return timed[warm:]


def summary(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Milliseconds per part as medians, the host's share and its 90th percentile, tokens per step as a mean."""
    for step in steps:
        model = step.pop(FORWARD) - step.get("pack", 0.0) - step.get("upload", 0.0)
        step["host"] = step["step"] - model
        step["rest"] = step["host"] - sum(step.get(part, 0.0) for part in PARTS)
    names = (*PARTS, "rest", "host")
    row = {name: statistics.median(step.get(name, 0.0) for step in steps) * 1e3 for name in names}
    row["p90"] = statistics.quantiles([step["host"] for step in steps], n=10)[-1] * 1e3
    row["rows"] = statistics.fmean(step["rows"] for step in steps)
    row["emitted"] = statistics.fmean(step["emitted"] for step in steps)
    return row


def load_tokenizer_of(source: str) -> PreTrainedTokenizerBase | None:
    from specdec.models import load_tokenizer, resolve_source
    from specdec.models.demo import demo_path

    if not source:
        return load_tokenizer(str(demo_path())) if Path(demo_path()).is_file() else None
    return load_tokenizer(resolve_source(source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="", help="model whose tokenizer turns ids to text; the demo model's, if it is there")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--drafter", nargs="+", default=["off", "ngram"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer_of(options.tokenizer)
    columns = (*PARTS, "rest", "host", "p90", "rows", "emitted")
    print(f"{'milliseconds per step':34}" + "".join(f"{name:>9}" for name in columns))
    for vocabulary in options.vocabulary:
        for temperature in options.temperature:
            for drafter in options.drafter:
                for batch in options.batch:
                    engine = make_engine(vocabulary, batch, drafter, tokenizer)
                    row = summary(run_case(engine, batch, temperature, options.steps))
                    engine.close()
                    name = f"{vocabulary:>6} T={temperature:g} {drafter} batch {batch}"
                    print(f"{name:34}" + "".join(f"{row[column]:9.3f}" for column in columns), flush=True)


if __name__ == "__main__":
    main()
