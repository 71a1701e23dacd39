"""Logits to choices: gathers the sampling parameters of rows, and lets the backend choose with the request's noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.backend.base import Backend, ChoiceBatch
from specdec.request import SamplingParams


class Chooser(Protocol):
    """Whoever a token is chosen for: a Request, or a drafter's view of one."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...


def choice_batch(choosers: Sequence[Chooser], positions: Sequence[int], repeats: Sequence[int]) -> ChoiceBatch:
    """Parameters per logit row.

    Args:
        choosers: one per request.
        positions: R indices in the sequence of the tokens to be chosen.
        repeats: logit rows of each request, in order; they add up to R.
    """
    counts = torch.tensor(repeats, dtype=torch.int64)
    params = [chooser.params for chooser in choosers]

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts)

    return ChoiceBatch(
        seeds=column([_signed(chooser.seed) for chooser in choosers], torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
    )


class NoiseSampler:
    """Chooses for a drafter as the target will: same noise, same parameters. Implements `drafters.base.Sample`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, logits: Tensor, rows: Sequence[Chooser], positions: Sequence[int]) -> list[int]:
        chosen: list[int] = self._backend.choose(logits, choice_batch(rows, positions, [1] * len(rows))).tolist()
        return chosen


def _signed(seed: int) -> int:
    """The 64 bits of a seed as the int64 that a tensor can hold."""
    return seed - 2**64 if seed >= 2**63 else seed
