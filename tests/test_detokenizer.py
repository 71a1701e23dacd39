from hypothesis import given
from hypothesis import strategies as st

from specdec.detokenizer import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool, int]:
    """Settled text, whether a stop was found, and pieces consumed."""
    matcher, text = StopMatcher(stops), ""
    for index, piece in enumerate(pieces):
        settled, stopped = matcher.push(piece)
        text += settled
        if stopped:
            return text, True, index + 1
    return text + matcher.flush(), False, len(pieces)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_the_first_stop_however_it_is_split(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    settled, stopped, consumed = run(stops, pieces)
    seen = "".join(pieces[:consumed])
    if stopped:
        assert any(seen.startswith(stop, len(settled)) for stop in stops)
        assert not any(stop in "".join(pieces[: consumed - 1]) for stop in stops)
    else:
        assert settled == text and not any(stop in text for stop in stops)


def test_a_near_miss_is_released() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("x EN") == ("x ", False)
    assert matcher.push("T") == ("ENT", False)
    assert matcher.push(" E") == (" ", False)
    assert matcher.flush() == "E"


def test_no_part_of_a_stop_is_ever_settled() -> None:
    matcher = StopMatcher(["stop"])
    assert [matcher.push(char) for char in "a sto"] == [("a", False), (" ", False), ("", False), ("", False), ("", False)]
    assert matcher.push("p!") == ("", True)
