"""Logits to choices: gathers the sampling parameters of rows, and lets the backend choose with the request's noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from specdec.backend.base import Backend, ChoiceBatch
from specdec.kernels.cpu_ops import filter_logits
from specdec.request import SamplingParams


class Chooser(Protocol):
    """Whoever a token is chosen for: a Request, or a drafter's view of one."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...


def choice_batch(choosers: Sequence[Chooser], positions: Sequence[int], repeats: Sequence[int] | None = None) -> ChoiceBatch:
    """Parameters per logit row.

    Args:
        choosers: one per request.
        positions: R indices in the sequence of the tokens to be chosen.
        repeats: logit rows of each request, in order; they add up to R. None for one each.
    """
    params = [chooser.params for chooser in choosers]

    def column(values: list[float] | list[int], dtype: type[np.generic]) -> Tensor:
        array = np.array(values, dtype=dtype)
        return torch.from_numpy(array if repeats is None else np.repeat(array, repeats))

    return ChoiceBatch(
        seeds=column([_signed(chooser.seed) for chooser in choosers], np.int64),
        positions=torch.from_numpy(np.array(positions, dtype=np.int64)),
        temperature=column([p.temperature for p in params], np.float32),
        top_k=column([p.top_k for p in params], np.int64),
        top_p=column([p.top_p for p in params], np.float32),
        min_p=column([p.min_p for p in params], np.float32),
        typical_p=column([p.typical_p for p in params], np.float32) if any(p.typical_p < 1 for p in params) else None,
    )


class Drafting(Chooser, Protocol):
    """A drafter's view of a request."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def wants_q(self) -> bool: ...


def filters(params: SamplingParams) -> bool:
    """Whether a request excludes tokens by their rank or probability."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1


def filtered(logits: Tensor, choice: ChoiceBatch) -> Tensor:
    """float32 [R, vocabulary]: `logits` with -inf at what the filters exclude; the tensor itself where none does."""
    return filter_logits(logits, choice.temperature, choice.top_k, choice.top_p, choice.min_p, choice.typical_p)


def probabilities(logits: Tensor, choice: ChoiceBatch) -> Tensor:
    """float32 [R, vocabulary]: what `Backend.choose` draws from, in a new tensor. Rows must have a temperature above 0."""
    kept = filtered(logits, choice)
    return torch.softmax((kept - kept.amax(1, keepdim=True)) / choice.temperature.clamp(min=1e-30)[:, None], dim=-1)


DRAFT_STREAM = 3
"""Noise of drafts under rules that read q; see `specdec.verifier.coins`."""
_NODE_BITS = 12  # the longest tree that is looked at has 4096 nodes


class NoiseSampler:
    """Chooses for a drafter as the target will: same noise, same parameters. Implements `drafters.base.Sample`.

    Args:
        backend: where the target runs.
        name: of the drafter. Under rules that read q, drafters of different names draw independently.
    """

    def __init__(self, backend: Backend, name: str = "") -> None:
        self._backend = backend
        self._stripe = crc32(name.encode()) >> _NODE_BITS << _NODE_BITS

    def named(self, name: str) -> NoiseSampler:
        return NoiseSampler(self._backend, name)

    def __call__(self, logits: Tensor, rows: Sequence[Chooser], positions: Sequence[int]) -> list[int]:
        chosen: list[int] = self._backend.choose(logits, choice_batch(rows, positions)).tolist()
        return chosen

    def draw(
        self, logits: Tensor, rows: Sequence[Drafting], positions: Sequence[int], nodes: Sequence[int], width: int = 1
    ) -> list[list[tuple[int, Tensor | None]]]:
        weighed = [index for index, row in enumerate(rows) if row.wants_q and not row.params.greedy]
        coupled = [index for index in range(len(rows)) if index not in set(weighed)]
        drawn: dict[int, list[tuple[int, Tensor | None]]] = {}
        if coupled:
            choice = choice_batch([rows[i] for i in coupled], [positions[i] for i in coupled])
            own = logits if width == 1 and not weighed else logits[coupled]
            drawn.update(zip(coupled, self._race(own, choice, width, say_q=False), strict=True))
        if weighed:
            places = [self._stripe + nodes[i] + 1 for i in weighed]
            choice = choice_batch([rows[i] for i in weighed], places)
            salts = torch.tensor([len(rows[i].tokens) for i in weighed], dtype=torch.int64)
            choice = replace(choice, stream=DRAFT_STREAM, salts=salts)
            drawn.update(zip(weighed, self._race(logits[weighed], choice, width, say_q=True), strict=True))
        return [drawn[index] for index in range(len(rows))]

    def _race(self, logits: Tensor, choice: ChoiceBatch, width: int, say_q: bool) -> list[list[tuple[int, Tensor | None]]]:
        """For each row the first `width` tokens of the noise race; fewer where fewer have a chance.

        Args:
            logits: float32 [R, vocabulary], changed if `width` is above 1.
            choice: per-row parameters and the noise.
            width: tokens per row.
            say_q: give the distribution that each was drawn from, those before it being gone.
        """
        if width > 1 or say_q:
            logits, choice = filtered(logits, choice), _unfiltered(choice)
        won: list[list[tuple[int, Tensor | None]]] = [[] for _ in logits]
        for place in range(width):
            if place:
                for row, drawn in enumerate(won):
                    if drawn:
                        logits[row, drawn[-1][0]] = -torch.inf
            chosen: list[int] = self._backend.choose(logits, choice).tolist()
            q = probabilities(logits, choice) if say_q else [None] * len(chosen)
            for row, token in enumerate(chosen):
                if token >= 0:
                    won[row].append((token, q[row]))
        return won


def _unfiltered(choice: ChoiceBatch) -> ChoiceBatch:
    neutral = torch.zeros_like(choice.min_p)
    return replace(choice, top_k=torch.zeros_like(choice.top_k), top_p=neutral + 1, min_p=neutral, typical_p=None)


def _signed(seed: int) -> int:
    """The 64 bits of a seed as the int64 that a tensor can hold."""
    return seed - 2**64 if seed >= 2**63 else seed
