"""What the verify curve learns of sizes that it sees, and of those that it does not."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.scheduler.cost_table import GRID, CostTable
from specdec.scheduler.verify_curve import VerifyCurve


def truth_s(tokens: float) -> float:
    """Flat up to 8 rows, then steep: as a small model in four bits on two cores."""
    return 0.005 * max(1.0, tokens / 8)


def curve_of(*, factor: float = 1.0, flat_until: int = 8) -> VerifyCurve:
    """Measured on a machine `factor` times as slow, and wrongly as flat up to so many rows."""
    return VerifyCurve(CostTable.measured({size: factor * truth_s(8 if size <= flat_until else size) for size in GRID}, 1e-8))


def observe(curve: VerifyCurve, sizes: list[int], random: np.random.Generator, noise: float = 0.03) -> None:
    for size in sizes:
        curve.observe(size, 100, 100 * size, truth_s(size) * float(np.exp(noise * random.standard_normal())))


def test_steps_of_one_size_move_the_others_by_the_pace_of_the_machine() -> None:
    curve = curve_of(factor=2.0)
    observe(curve, [4] * 60, np.random.default_rng(0))
    assert curve.pace == pytest.approx(0.5, rel=0.1)
    for size in (1, 8, 64, 512):
        assert curve.one_s(size) == pytest.approx(truth_s(size), rel=0.25)


def test_what_two_sizes_differ_by_is_in_doubt_until_both_were_seen() -> None:
    random = np.random.default_rng(1)
    curve = curve_of(flat_until=12)
    assert curve.one_s(12) == curve.one_s(8)
    observe(curve, [12, 11, 13] * 40, random)
    assert curve.one_s(12) == pytest.approx(truth_s(12), rel=0.1)
    doubt = curve.doubt(8, 12)
    assert doubt > 0.05
    observe(curve, [8, 12] * 10, random)
    assert curve.one_s(12) / curve.one_s(8) == pytest.approx(1.5, rel=0.12)
    assert curve.doubt(8, 12) < 0.6 * doubt


def test_doubt_is_none_between_a_size_and_itself_and_never_more_than_at_the_start() -> None:
    curve = curve_of()
    first = curve.doubt(2, 48)
    observe(curve, [4] * 2000, np.random.default_rng(2))
    assert curve.doubt(5, 5) == 0.0
    assert 0 < curve.doubt(2, 48) <= first * (1 + 1e-9)


def test_kv_is_told_from_rows() -> None:
    curve = curve_of()
    random = np.random.default_rng(3)
    for _ in range(300):
        cached = int(random.integers(0, 50_000))
        curve.observe(4, cached, 0, truth_s(4) + 2e-7 * cached)
    assert curve.kv_token_s == pytest.approx(2e-7, rel=0.2)
    assert curve.one_s(4) == pytest.approx(truth_s(4), rel=0.1)


def test_what_attention_computes_for_a_row_more_is_told_from_what_it_reads() -> None:
    curve = VerifyCurve(CostTable.measured({size: truth_s(size) for size in GRID}, 1e-6, pair_s=1e-7))
    random = np.random.default_rng(5)
    for _ in range(400):
        rows, cached = int(random.integers(1, 9)), int(random.integers(100, 3000))
        curve.observe(rows, cached, rows * cached, truth_s(rows) + 1e-6 * rows * cached + 1e-7 * cached)
    assert curve.pair_s == pytest.approx(1e-6, rel=0.15)
    assert curve.one_s(8, 2000, 16000) - curve.one_s(7, 2000, 14000) == pytest.approx(2e-3, rel=0.2)


@pytest.mark.parametrize("table", [CostTable.guess(), CostTable((1,), (0.01,)), CostTable((1, 4), (0.01, 0.02), weight=20)])
def test_any_noise_leaves_it_ascending_and_finite(table: CostTable) -> None:
    random = np.random.default_rng(4)
    curve = VerifyCurve(table)
    for _ in range(500):
        curve.observe(*(int(random.integers(1, most)) for most in (900, 9000, 99000)), float(np.exp(3 * random.standard_normal() - 5)))
        seconds = curve.many_s(np.arange(1, 1000))
        assert np.isfinite(seconds).all() and (seconds > 0).all() and (np.diff(seconds) >= -1e-12 * seconds[:-1]).all()
        assert np.linalg.eigvalsh(curve._covariance)[0] > -1e-9
