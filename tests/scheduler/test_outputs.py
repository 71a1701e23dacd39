import numpy as np
import pytest

from specdec.scheduler.outputs import OutputLengths


def test_short_outputs_that_end_first_do_not_make_all_look_short() -> None:
    """64 outputs of 200 tokens on average start at once; after 50 tokens only the short ones have ended."""
    lengths = np.random.default_rng(0).geometric(1 / 200, 64).tolist()
    known = OutputLengths()
    for length in lengths:
        if length <= 50:
            known.end(length)
    assert known.expected_rest(0, [50] * sum(length > 50 for length in lengths)) == pytest.approx(200, rel=0.35)


def test_what_is_left_of_a_long_output_is_told_by_those_that_were_longer() -> None:
    known = OutputLengths()
    for _ in range(200):
        known.end(20)
        known.end(1000)
    assert known.expected_rest(10, []) == pytest.approx(500, rel=0.02)
    assert known.expected_rest(30, []) == pytest.approx(970, rel=0.02)


def test_before_anything_has_ended_an_answer_of_usual_length_is_expected() -> None:
    assert 50 <= OutputLengths().expected_rest(1, []) <= 500
    assert OutputLengths().expected_rest(1, [400]) > 400
