"""The acceptance model against simulated drafters whose rates are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specdec.plan import RowOutcome
from specdec.scheduler.acceptance import DrafterAcceptance
from specdec.scheduler.calibration import Calibration
from specdec.tree import DraftTree


def verify(known: DrafterAcceptance, name: str, accepted: int, size: int, finish: str | None = None) -> None:
    known.verify([name], [DraftTree.chain(range(size))], [RowOutcome((0,) * (accepted + 1), tuple(range(accepted)), finish)])


def accept(random: np.random.Generator, rates: Sequence[float]) -> int:
    return next((level for level, rate in enumerate(rates) if random.random() >= rate), len(rates))


def test_rates_are_conditional_and_censored_levels_say_nothing() -> None:
    known = DrafterAcceptance()
    truth = (0.9, 0.6, 0.8, 0.3)
    random = np.random.default_rng(0)
    for step in range(1500):
        size = 1 + step % 4  # short windows must not look like misses of what lies behind them
        verify(known, f"r{step % 8}", accept(random, truth[:size]), size)
    rates = known.rates(["new"], 4)[0]
    assert rates == pytest.approx(truth, abs=0.15)


def test_levels_behind_a_stop_are_unknown() -> None:
    known, other = DrafterAcceptance(), DrafterAcceptance()
    for _ in range(20):
        verify(known, "a", 1, 4, finish="stop")
        verify(other, "a", 1, 4)
    assert known.rates(["a"], 2)[0, 1] > 0.8 > 0.2 > other.rates(["a"], 2)[0, 1]


@pytest.mark.parametrize(("before", "after"), [(0, 4), (4, 0)], ids=["bad to perfect", "perfect to bad"])
def test_a_change_is_followed_within_some_ten_verifies(before: int, after: int) -> None:
    known = DrafterAcceptance()
    for _ in range(200):
        verify(known, "a", before, 4)
    for _ in range(14):
        verify(known, "a", after, 4)
    rate = known.rates(["a"], 1)[0, 0]
    assert rate > 0.6 if after else rate < 0.4


def test_requests_that_differ_are_told_apart_and_those_that_do_not_are_not() -> None:
    random = np.random.default_rng(0)
    alike, mixed = DrafterAcceptance(), DrafterAcceptance()
    names = [f"r{index}" for index in range(16)]
    for _ in range(40):
        for index, name in enumerate(names):
            verify(alike, name, accept(random, [0.6] * 4), 4)
            verify(mixed, name, accept(random, [0.95 if index % 2 else 0.1] * 4), 4)
    same, different = alike.rates(names, 1)[:, 0], mixed.rates(names, 1)[:, 0]
    assert same.std() < 0.06
    assert different[1::2].min() > 0.75 > 0.4 > different[::2].max()


def test_a_new_request_starts_with_what_others_of_its_drafter_had_and_ended_ones_are_forgotten() -> None:
    known = DrafterAcceptance()
    for step in range(300):
        verify(known, f"r{step}", 0, 3)
        known.requests.forget(f"r{step}")
    assert known.rates(["new"], 1)[0, 0] < 0.1
    assert len(known.requests) == 0


def test_a_tree_tells_of_the_levels_of_its_accepted_path_and_of_ranks() -> None:
    known = DrafterAcceptance()
    tree = DraftTree(np.arange(4, dtype=np.int32), np.array([-1, -1, 0, 1], dtype=np.int32))
    for _ in range(60):
        known.verify(["a"], [tree], [RowOutcome((0, 0), (1,), None)])  # the second child, then neither of its own
    rates = known.rates(["a"], 2)[0]
    assert rates[0] > 0.9
    assert rates[1] < 0.2
    shares = known.rank_shares()[1]
    assert known.rank_shares()[0, 0] == 1, "an only child has all of it"
    assert shares[1] == pytest.approx(shares[0]), "seen to be better, but elder siblings are kept first"


def test_a_request_that_beats_its_confidences_is_believed_more() -> None:
    known = DrafterAcceptance()
    tree = DraftTree.chain(range(3), np.full(3, 0.5, dtype=np.float32))
    for _ in range(40):
        for index in range(8):
            good = index < 2
            known.verify([f"r{index}"], [tree], [RowOutcome((0,), (0, 1, 2) if good else (), None)])
    rates = known.node_rates(np.array([0.5, 0.5]), np.array([0, 1]), ["r0", "r7"])
    assert rates[0] > 0.6 > 0.3 > rates[1]


@pytest.mark.parametrize(
    "true_rate",
    [lambda c: c, lambda c: c**3, lambda c: 0.3 + 0.4 * c, lambda c: 1 / (1 + np.exp(-8 * (c - 0.3)))],
    ids=["honest", "too sure", "too flat", "steep"],
)
def test_confidences_are_reliable_within_a_twentieth_per_decile_after_2000_drafts(true_rate) -> None:  # type: ignore[no-untyped-def]
    random = np.random.default_rng(3)
    calibration = Calibration()
    for _ in range(2000):
        stated = random.random(4)
        calibration.observe(stated, random.random(4) < true_rate(stated))
    stated = np.sort(random.random(20000))
    rates = calibration.rates(stated)
    assert (np.diff(rates) >= 0).all()
    for decile in np.array_split(np.arange(20000), 10):
        assert rates[decile].mean() == pytest.approx(true_rate(stated[decile]).mean(), abs=0.05)
