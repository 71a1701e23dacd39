import pytest

from specdec.step_clock import StepClock


def test_every_second_is_booked_once() -> None:
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    clock = StepClock(lambda: next(times))
    for kind in ("host", "draft", "verify", "commit"):
        clock.mark(kind)
    cost = clock.cost({"ngram": 1.5})
    assert cost.draft_s == {"ngram": 1.5}
    assert (cost.verify_s, cost.sample_s, cost.commit_s) == (3.0, 0.0, 4.0)
    assert cost.host_s == pytest.approx(1.0 + 5.0 + 0.5)
    assert cost.total_s == pytest.approx(15.0)
