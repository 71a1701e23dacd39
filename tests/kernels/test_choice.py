"""The choice of tokens: the compiled kernel against its reference on random input, and the law that both keep."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.backend.base import ChoiceBatch
from specdec.kernels import cpu_ops, reference
from specdec.kernels.build import load_cpu_kernels


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no C++ compiler: the references are what runs")


def choice(rows: int, **columns: torch.Tensor) -> ChoiceBatch:
    """Rows that are sampled at temperature 1 without filters, but for the columns given."""
    zeros, ones = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    plain = ChoiceBatch(seeds=zeros, positions=zeros, temperature=ones, top_k=zeros, top_p=ones, min_p=torch.zeros(rows))
    return dataclasses.replace(plain, **columns)


FILTERS = [
    {},
    {"top_k": 3},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.01},
    {"typical_p": 0.7},
    {"top_p": 0.95, "typical_p": 0.5},
]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 7, 63, 64, 65, 200, 3000]), st.sampled_from(FILTERS), st.booleans())
@settings(max_examples=60, deadline=None)
def test_filtered_choice_equals_its_reference(seed: int, vocabulary: int, parameters: dict[str, float], ties: bool) -> None:
    """Also where logits tie, as those of a bfloat16 model do, and where some are masked."""
    generator = torch.Generator().manual_seed(seed)
    rows = 4
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    if ties:
        logits = logits.round()
    logits[1, torch.rand(vocabulary, generator=generator) < 0.7] = -torch.inf
    logits[1, vocabulary // 2] = 0
    columns = {
        name: torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32) for name, value in parameters.items()
    }
    batch = choice(
        rows,
        seeds=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        positions=torch.arange(rows) * 999,
        temperature=torch.tensor([0.0, 0.3, 1.0, 6.0])[torch.randperm(rows, generator=generator)],
        salts=torch.arange(rows),
        **columns,
    )
    batch = dataclasses.replace(batch, stream=seed % 4)
    assert cpu_ops.choose(logits, batch).tolist() == reference.choose(logits, batch).tolist()


def test_a_large_vocabulary_with_many_tokens_in_the_race() -> None:
    """Blocks are skipped by a bound on what their tokens could score: flat rows, where every block is in the race to the end."""
    logits = torch.randn(8, 50_000, generator=torch.Generator().manual_seed(3)) * 0.5
    batch = choice(8, seeds=torch.arange(8), positions=torch.arange(8) * 7, temperature=torch.linspace(0.1, 4, 8))
    assert cpu_ops.choose(logits, batch).tolist() == reference.choose(logits, batch).tolist()


def test_a_column_of_the_wrong_type_or_length_is_refused() -> None:
    logits = torch.zeros(2, 5)
    with pytest.raises(TypeError, match=r"expected 2 elements of torch.float32, got 2 of torch.float64"):
        cpu_ops.choose(logits, choice(2, temperature=torch.ones(2, dtype=torch.float64)))
    with pytest.raises(TypeError, match=r"expected 2 elements of torch.int64, got 1 "):
        cpu_ops.choose(logits, choice(2, seeds=torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(TypeError, match="float16"):
        cpu_ops.choose(logits.half(), choice(2))


@given(st.integers(0, 2**63 - 1), st.floats(0.1, 3.0), st.integers(1, 40), st.booleans())
@settings(max_examples=50, deadline=None)
def test_choice_equals_its_reference(seed: int, temperature: float, vocabulary: int, greedy: bool) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.randn(5, vocabulary, generator=generator) * 4
    logits[0, 0] = -torch.inf
    seeds = torch.arange(5) + seed - 2**62
    temperatures = torch.full((5,), 0.0 if greedy else temperature)
    batch = choice(5, seeds=seeds, positions=torch.arange(5) * 1000, temperature=temperatures)
    assert cpu_ops.choose(logits, batch).tolist() == reference.choose(logits, batch).tolist()


@pytest.mark.parametrize("ops", [cpu_ops, reference])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_logit_or_with_nan_has_no_choice(ops: type[cpu_ops], temperature: float) -> None:
    logits = torch.zeros(3, 6)
    logits[0] = -torch.inf
    logits[1, 3] = torch.nan
    chosen = ops.choose(logits, choice(3, temperature=torch.full((3,), temperature)))
    assert chosen[:2].tolist() == [-1, -1]
    assert chosen[2] >= 0


@pytest.mark.parametrize("ops", [cpu_ops, reference])
def test_greedy_ties_go_to_the_lowest_id(ops: type[cpu_ops]) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]])
    assert ops.choose(logits, choice(1, temperature=torch.zeros(1))).tolist() == [1]


def test_philox_gives_the_published_vectors() -> None:
    """Known-answer tests of Random123 for philox4x32-10, as far as the counter layout (c3 = 0) can express them."""
    words = [int(reference.philox(0, np.array([lane]), 0, 0)[0]) for lane in range(4)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_the_choice_law_is_p() -> None:
    """10^5 positions of one seed: every frequency within 5 standard deviations of p, and p = 0 never chosen."""
    p = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02, 0.0])
    n = 100_000
    counts = torch.zeros(8)
    for start in range(0, n, 10_000):
        positions = torch.arange(start, start + 10_000)
        logits = p.log().expand(len(positions), 8).contiguous()
        chosen = cpu_ops.choose(logits, choice(len(positions), seeds=torch.full((len(positions),), 7), positions=positions))
        counts += torch.bincount(chosen, minlength=8)
    assert counts[7] == 0
    assert ((counts / n - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-12).all()


def test_gumbel_stays_in_the_range_that_the_margin_rests_on() -> None:
    least, most = reference.gumbel(np.array([2**32 - 1, 0], dtype=np.uint32)).tolist()
    assert -3.14 < least < most < 22.88
    assert most - least < reference.MARGIN


@pytest.mark.parametrize("ops", [cpu_ops, reference])
def test_log_sum_exp_turns_logits_into_log_probabilities(ops: type[cpu_ops]) -> None:
    """Also at temperatures where the largest weight is all there is, and at a vocabulary that fills no block."""
    generator = torch.Generator().manual_seed(3)
    for vocabulary in (1, 63, 64, 1000, 4097):
        logits = torch.randn(4, vocabulary, generator=generator) * 8
        logits[2] = torch.nan
        logits[3, 1:] = -torch.inf
        for temperature in (1e-9, 0.3, 1.0, 7.0):
            totals = ops.log_sum_exp(logits, torch.full((4,), temperature))
            share = (logits.double() / torch.tensor(temperature, dtype=torch.float32).double() - totals[:, None]).exp()
            kept = torch.tensor([0, 1, 3])
            assert totals[2].isnan()
            assert torch.allclose(share[kept].sum(1), torch.ones(3, dtype=torch.float64), atol=1e-5)
            assert torch.allclose(share[kept], (logits[kept].double() / temperature).softmax(1), atol=1e-5)
    empty = torch.full((1, 5), -torch.inf)
    assert ops.log_sum_exp(empty, torch.ones(1)).isnan().all()
