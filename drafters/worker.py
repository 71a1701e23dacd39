"""Runs a user's code in a thread of its own, so that it can be given up on. It is not stopped: Python cannot do that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerTimeout(Exception):
    """A call took too long. Not a TimeoutError, which the call itself may raise."""


class _Task:
    """One call: what to run, and how it went."""

    def __init__(self, function: Callable[[], Any]) -> None:  # any result; Worker.call gives it back with its type
        self.function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:  # a drafter's sys.exit() is an error of the drafter, not the end of the server
            self.error = error
        self.done.set()


class Worker:
    """A daemon thread that runs one call at a time."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Runs `function` in the thread and returns its result.

        Raises:
            WorkerTimeout: no result after `timeout_s`; the thread is lost and the worker must not be used again.
            BaseException: whatever `function` raised.
        """
        task = _Task(function)
        self._tasks.put(task)
        if not task.done.wait(timeout_s):
            raise WorkerTimeout(f"no answer within {timeout_s:g} s")
        if task.error is not None:
            raise task.error
        result: T = task.result
        return result

    def close(self) -> None:
        """Ends the thread once it is idle; returns at once."""
        self._tasks.put(None)


def _serve(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
