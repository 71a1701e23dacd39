"""Several readers on one engine: whoever steps it delivers the events of all, so that none is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from specdec.engine import Engine
from specdec.errors import EngineDeadError, SpecdecError
from specdec.plan import Event


class Mailbox:
    """Adds requests to an engine and hands each reader the events of its own, from any thread.

    The thread that wants news steps the engine; the others wait for it and then look into their boxes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._stepping = False
        self._boxes: dict[str, list[Event]] = {}

    def add(self, add: Callable[[], list[str]]) -> list[str]:
        """Runs `add`, a call of `Engine.add`, and opens a box for each of the ids it returns."""
        with self._lock:
            self._refuse_recursion()
            ids = add()
            self._boxes.update({request_id: [] for request_id in ids})
            return ids

    def next(self, request_ids: Iterable[str]) -> list[Event]:
        """What came for these requests; steps the engine, once, if nothing has. May be empty.

        Raises:
            EngineDeadError: nothing came and nothing can come any more.
        """
        with self._lock:
            self._refuse_recursion()
            wanted = list(request_ids)
            if not any(self._boxes[request_id] for request_id in wanted):
                if not self._engine.has_work:
                    raise EngineDeadError("the engine was closed, or lost these requests: build a new LLM")
                self._stepping = True
                try:
                    self._deliver(self._engine.step())
                finally:
                    self._stepping = False
            events: list[Event] = []
            for request_id in wanted:
                events += self._boxes[request_id]
                self._boxes[request_id] = []
            return events

    def close(self, request_ids: Iterable[str]) -> None:
        """Ends these requests if they still run, and throws away what comes for them."""
        with self._lock:
            for request_id in request_ids:
                if self._boxes.pop(request_id, None) is not None:
                    self._engine.abort(request_id)
            self._deliver(self._engine.step_news())

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.request_id in self._boxes:
                self._boxes[event.request_id].append(event)

    def _refuse_recursion(self) -> None:
        if self._stepping:  # only the stepping thread itself gets past the lock then
            raise SpecdecError("the engine is in the middle of a step: a drafter or logits processor must not generate with the same LLM")
