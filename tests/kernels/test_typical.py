"""typical_p against its definition, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.kernels.filters import filter_logits


def kept_by(logits: torch.Tensor, typical_p: float, *, temperature: float = 1.0, top_k: int = 0) -> list[int]:
    kept = filter_logits(
        logits[None],
        torch.tensor([temperature]),
        torch.tensor([top_k]),
        torch.ones(1),
        torch.zeros(1),
        torch.tensor([typical_p]),
    )
    return kept[0].isfinite().nonzero().squeeze(1).tolist()


def definition(logits: torch.Tensor, typical_p: float, temperature: float, top_k: int) -> list[int]:
    order = sorted(range(len(logits)), key=lambda token: -float(logits[token]))[: top_k or None]
    weights = {token: math.exp(float(logits[token]) / temperature) for token in order}
    p = {token: weight / sum(weights.values()) for token, weight in weights.items()}
    entropy = -sum(value * math.log(value) for value in p.values())
    kept: list[int] = []
    for token in sorted(order, key=lambda token: abs(-math.log(p[token]) - entropy)):
        if sum(p[other] for other in kept) >= typical_p:
            break
        kept.append(token)
    return sorted(kept)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.5, 9)])
def test_it_keeps_the_smallest_set_of_typical_tokens(seed: int, temperature: float, top_k: int) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 2
    for typical_p in (0.01, 0.2, 0.5, 0.9, 0.99):
        assert kept_by(logits, typical_p, temperature=temperature, top_k=top_k) == definition(logits, typical_p, temperature, top_k)


def test_the_most_probable_token_need_not_be_typical() -> None:
    logits = torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1]).log()
    assert kept_by(logits, 0.3) == [0]  # surprise 0.69 against an entropy of 1.50; the others' is 2.30
    logits = torch.tensor([0.3, 0.14, 0.14, 0.14, 0.14, 0.14]).log()
    assert kept_by(logits, 0.3) == [1, 2, 3]  # 1.20 and 1.97 against 1.74, and ties by the lowest id


def test_it_touches_only_rows_that_ask() -> None:
    logits = torch.randn(3, 30)
    off = (torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3, dtype=torch.int64), torch.ones(3), torch.zeros(3))
    assert filter_logits(logits, *off, torch.ones(3)) is logits
    out = filter_logits(logits, *off, torch.tensor([1.0, 0.4, 0.4]))
    assert torch.equal(out[[0, 2]], logits[[0, 2]])
    assert (out[1] == -torch.inf).any() and out[1].isfinite().any()


def test_banned_tokens_are_not_counted() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    masked = torch.cat([logits, torch.full((50,), -torch.inf)])
    assert kept_by(masked, 0.95) == kept_by(logits, 0.95) == [0, 1, 2]
