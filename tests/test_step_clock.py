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


def test_what_a_step_does_after_its_books_are_closed_is_carried_to_the_next() -> None:
    times = iter([0.0, 2.0, 3.5, 10.0, 11.0])
    first = StepClock(lambda: next(times))
    assert first.cost({}).total_s == 2.0
    tail_s = first.since_last()
    second = StepClock(lambda: next(times), tail_s)
    assert (tail_s, second.cost({}).host_s) == (1.5, 1.0 + 1.5)
