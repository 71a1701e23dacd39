"""Prefill speed, and the cost of one forward by the number of its rows, on an idle engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from specdec.eval.machine import ReadBandwidth
from specdec.eval.samples import Samples
from specdec.pack import PackRow
from specdec.request import SamplingParams

if TYPE_CHECKING:
    from specdec.engine import Engine

CONTEXT = 256
"""Tokens before the rows of a timed step, where the model allows it."""

Round = Callable[[int, int], None]
"""Called as (rounds done, rounds in all)."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of forwards, all their rows' logits included.

    Attributes:
        context: tokens in the KV before the first row.
        seconds: rows -> one measurement per round.
        bandwidth: bytes per second, one measurement per round.
        bandwidth_method: how it was measured.
    """

    context: int
    seconds: dict[int, Samples]
    bandwidth: Samples
    bandwidth_method: str

    def floor_share(self, weight_bytes: int) -> Samples:
        """Of the forward of one row: the time that reading the weights takes at the bandwidth of the round, over the time taken."""
        return Samples.of(weight_bytes / rate for rate in self.bandwidth.values).ratios(self.seconds[1])


def measure_prefill(engine: Engine, lengths: Sequence[int], repeats: int, done: Round) -> dict[int, Samples]:
    """Tokens per second from a prompt to its first token, by prompt length; the lengths take turns."""
    _prefill_s(engine, lengths[0])
    rates: dict[int, list[float]] = {length: [] for length in lengths}
    for number in range(repeats):
        for length in lengths:
            rates[length].append(length / _prefill_s(engine, length))
        done(number + 1, repeats)
    return {length: Samples.of(values) for length, values in rates.items()}


def _prefill_s(engine: Engine, length: int) -> float:
    clock = engine.target.backend.clock
    engine.reset_prefix_cache()
    start = clock()
    engine.add(_ids(engine, length), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), drafter="off")
    while engine.has_work:
        engine.step()
    return clock() - start


def measure_steps(engine: Engine, sizes: Sequence[int], rounds: int, done: Round) -> StepTimes:
    """Times forwards of one request: a pending token and a chain of draft nodes behind some context. Sizes take turns.

    The pages are taken by number, beside the books: nothing runs, and no page is published that this could overwrite.

    Args:
        sizes: token rows, 1 among them; `engine.max_model_len` has room for the largest.
    """
    engine.reset_prefix_cache()
    runner, clock = engine.target, engine.target.backend.clock
    context = min(CONTEXT, engine.max_model_len - max(sizes))
    ids = _ids(engine, context + max(sizes))
    pages = np.arange(-(-len(ids) // runner.page_size), dtype=np.int32)
    chunk = engine.config.max_batch_tokens
    for start in range(0, context, chunk):
        runner.forward([PackRow(ids[start : min(start + chunk, context)], start, pages, num_logits=1)])

    def step(size: int) -> float:
        parents = np.arange(size - 1, dtype=np.int32) - 1 if size > 1 else None
        start = clock()
        runner.forward([PackRow(ids[context : context + size], context, pages, num_logits=size, parents=parents)])
        return clock() - start

    bandwidth = ReadBandwidth()
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:
        step(size)
    for number in range(rounds):
        bandwidth.sample()
        step(1)  # whoever comes first after the buffer finds the caches cold
        for size in sizes:
            seconds[size].append(step(size))
        done(number + 1, rounds)
    return StepTimes(context, {size: Samples.of(values) for size, values in seconds.items()}, Samples.of(bandwidth.samples), str(bandwidth))


def weights_read(model: nn.Module) -> dict[str, int]:
    """Bytes of weights that a forward of one row reads, by dtype: all but embeddings, of which it reads single rows."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            held = (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values())
            found |= {id(value): value for value in held if isinstance(value, torch.Tensor)}
    sizes: dict[str, int] = {}
    for tensor in found.values():
        name = "blocks" if tensor.dtype == torch.uint8 else str(tensor.dtype).removeprefix("torch.")  # of quantised weights
        sizes[name] = sizes.get(name, 0) + tensor.numel() * tensor.element_size()
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _ids(engine: Engine, length: int) -> list[int]:
    """Ids all over the vocabulary: what a forward costs does not depend on which they are."""
    return [(17 + 7919 * index) % engine.vocab_size for index in range(length)]
