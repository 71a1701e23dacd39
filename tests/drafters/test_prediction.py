"""The user's predicted output: followed, left, and taken up again."""

from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters.prediction import PredictionDrafter
from specdec.testing import make_row

PROMPT = [90, 91]


def replay(prediction, output, limit=8):
    """Accepted tokens per step over a whole output."""
    drafter, accepted, done = PredictionDrafter(), [], 0
    while done < len(output):
        row = make_row([*PROMPT, *output[:done]], num_prompt=2, prediction=prediction, limit=limit, depth=len(output) - done)
        (tree,) = drafter.propose([row])
        tree.validate(1000)
        assert len(tree) <= limit
        paths = tree.paths() or [[]]
        taken = max(next((i for i, (a, b) in enumerate(zip(path, output[done:], strict=False)) if a != b), len(path)) for path in paths)
        accepted.append(taken)
        done += taken + 1
    return accepted


def test_no_prediction_no_draft():
    assert [len(tree) for tree in PredictionDrafter().propose([make_row([1, 2, 3])])] == [0]


def test_a_right_prediction_is_accepted_whole():
    text = list(range(30))
    assert replay(text, text) == [8, 8, 8, 3]


def test_a_changed_token_costs_one_step():
    text = list(range(40))
    assert sum(replay(text, [*text[:10], 500, *text[11:]])) >= 34


def test_an_inserted_token_costs_one_step():
    text = list(range(40))
    assert sum(replay(text, [*text[:10], 500, *text[10:]])) >= 34


def test_a_deleted_stretch_is_skipped():
    text = list(range(60))
    assert sum(replay(text, [*text[:10], *text[16:]])) >= 44


def test_a_new_stretch_is_left_alone_and_the_text_taken_up_again():
    text = list(range(40))
    accepted = replay(text, [*text[:10], *range(500, 512), *text[10:]])
    assert sum(accepted) >= 30 - 4


def test_a_moved_stretch_is_found_behind_the_cursor():
    text = list(range(60))
    assert sum(replay(text, [*text[40:60], *text[:20]])) >= 28


def test_state_derives_from_the_tokens_alone():
    text = list(range(40))
    output = [*text[:10], 500, *text[11:]]
    kept, row = PredictionDrafter(), None
    for length in range(0, 30):
        row = make_row([*PROMPT, *output[:length]], num_prompt=2, prediction=text)
        assert kept.propose([row])[0] == PredictionDrafter().propose([row])[0]
    before = kept.propose([row])[0]
    kept.forget("request")
    assert not kept._cursors and kept.propose([row])[0] == before


@given(st.lists(st.integers(0, 4), max_size=30), st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 9))
def test_any_text_gives_valid_trees(prediction, output, limit):
    replay(prediction, output, limit)
