"""The read-only view of a request's tokens, and the thread a user's code runs in."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters.view import TokenView
from specdec.drafters.worker import Worker, WorkerTimeout


@given(st.lists(st.integers(0, 99), max_size=12), st.integers(-14, 14), st.integers(-14, 14), st.sampled_from([1, 2, -1, -2]))
def test_view_reads_like_its_list(tokens, start, stop, step):
    view = TokenView(tokens)
    assert view[start:stop:step] == tokens[start:stop:step]
    assert view[:] == tokens and list(view) == tokens and view == tokens
    assert np.array_equal(np.asarray(view), np.array(tokens, dtype=np.int32))
    assert list(reversed(view)) == tokens[::-1]
    if -len(tokens) <= start < len(tokens):
        assert view[start] == tokens[start]
    else:
        with pytest.raises(IndexError):
            view[start]


def test_view_is_a_snapshot_of_a_growing_list():
    tokens = [1, 2, 3]
    view = TokenView(tokens)
    tokens.append(4)
    assert list(view) == [1, 2, 3] and view[-1] == 3 and view[:] == [1, 2, 3] and view[1:9] == [2, 3]


def test_view_cannot_change_its_list():
    tokens = [1, 2, 3]
    view = TokenView(tokens)
    for change in ("append", "extend", "pop", "clear", "sort", "reverse", "insert"):
        assert not hasattr(view, change)
    with pytest.raises(TypeError):
        view[0] = 9  # type: ignore[index]
    np.asarray(view)[0] = 9
    view[:].append(9)
    extended = view + [9]  # noqa: RUF005  # the operator is what is tested
    extended.append(9)
    assert tokens == [1, 2, 3]


def test_worker_gives_results_and_errors_back():
    worker = Worker("test")
    assert worker.call(lambda: 3, 5.0) == 3
    for error in (ValueError("no"), SystemExit(3), KeyboardInterrupt()):

        def fail(error=error):
            raise error

        with pytest.raises(type(error)):
            worker.call(fail, 5.0)
    assert worker.call(lambda: 4, 5.0) == 4
    worker.close()


def test_worker_is_given_up_on_after_the_time_out():
    worker, release = Worker("test"), threading.Event()
    with pytest.raises(WorkerTimeout):
        worker.call(release.wait, 0.02)
    release.set()
    worker.close()
