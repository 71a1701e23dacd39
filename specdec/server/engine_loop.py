"""The engine in a thread of its own, and asyncio's way to it. Knows nothing of HTTP.

    event loop                       engine thread
    submit() ── commands queue ──▶   add / abort / call
    Ticket   ◀── one batch a step ── step()

Everything that touches the engine runs in its thread, so the engine needs no locks. All events of a step reach the
event loop in one `call_soon_threadsafe`, so a step costs one wake-up however many requests it serves.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from specdec.config import EngineConfig
from specdec.errors import EngineDeadError
from specdec.plan import Event
from specdec.request import DEFAULT_SCHEDULING, Constraint, SamplingParams, Scheduling

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineLike(Protocol):
    """The part of `specdec.engine.Engine` that serving needs; tests hand in a fake."""

    config: EngineConfig
    tokenizer: Any  # a transformers tokenizer, or None
    max_model_len: int
    model_name: str

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        drafter: str | None = None,
        prediction: Sequence[int] = (),
        scheduling: Scheduling = DEFAULT_SCHEDULING,
    ) -> list[str]: ...
    def compile(self, constraint: Constraint) -> None: ...
    def prepare_constraints(self) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Event]: ...
    @property
    def has_work(self) -> bool: ...
    def status(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Submission:
    """One prompt to run: the arguments of `Engine.add`."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    drafter: str | None = None
    prediction: Sequence[int] = ()
    scheduling: Scheduling = DEFAULT_SCHEDULING


@dataclass
class Ticket:
    """The caller's end of a group of submissions, read on the event loop.

    Attributes:
        choices: engine request ids, by submission and then by choice.
        events: (index in `choices`, event), in the order of the engine; an Exception when the engine has died.
    """

    choices: list[str] = field(default_factory=list)
    events: asyncio.Queue[tuple[int, Event] | Exception] = field(default_factory=asyncio.Queue)
    running: set[str] = field(default_factory=set)

    async def next(self) -> tuple[int, Event]:
        """The next event. Raises what ended the engine, if it has ended."""
        item = await self.events.get()
        if isinstance(item, Exception):
            self.events.put_nowait(item)
            raise item
        if item[1].finish_reason is not None:
            self.running.discard(item[1].request_id)
        return item


class AsyncEngine:
    """Runs an engine in a thread and fans its events out.

    Args:
        engine: owned from now on; closed by `close`.
        stall_s: see `healthy`.
    """

    def __init__(self, engine: EngineLike, *, stall_s: float = 120.0) -> None:
        self.engine = engine
        self.stall_s = stall_s
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[str, tuple[Ticket, int]] = {}  # engine thread only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._last_token_s = time.monotonic()
        self._num_running = 0
        self._lock = threading.RLock()  # orders the last commands against the end; a signal handler may come in the middle
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread; call it on the event loop that will use this."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, submissions: Sequence[Submission]) -> Ticket:
        """Adds all submissions, or none. Raises RequestError for a bad one, EngineDeadError when the engine has ended."""
        ticket = Ticket()
        try:
            await self.call(lambda: self._add(ticket, submissions))
        except asyncio.CancelledError:
            self._post(lambda: self._abort(list(ticket.choices)))  # runs after the add, whether or not that has happened yet
            raise
        ticket.running = set(ticket.choices)
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Aborts what still runs of a ticket. Safe to call at any time, also twice."""
        running, ticket.running = list(ticket.running), set()
        if running:
            self._post(lambda: self._abort(running))

    async def call(self, function: Callable[[], T]) -> T:
        """Runs a function in the engine thread, between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # None only where T allows it

        def command() -> None:
            try:
                result = function()
            except Exception as error:
                self._notify(settle, None, error)
            else:
                self._notify(settle, result, None)

        if not self._post(command):
            raise self._death()
        return await future

    @property
    def dead(self) -> bool:
        return self._dead is not None

    @property
    def num_running(self) -> int:
        """Requests that have been added and not finished."""
        return self._num_running

    @property
    def healthy(self) -> bool:
        """False when the engine has ended, or requests run and none has got a token for `stall_s` seconds."""
        return not self.dead and (self._num_running == 0 or time.monotonic() - self._last_token_s < self.stall_s)

    def stop(self) -> None:
        """Asks the thread to end everything that runs, and itself. Does not wait."""
        self._end(EngineDeadError("the server is shutting down"))

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends everything that runs and the thread, which closes the engine. Streams get an EngineDeadError."""
        self.stop()
        if self._loop is None:
            self.engine.close()
        elif self._thread.is_alive():
            self._thread.join(timeout_s)

    # The rest runs in the engine thread.

    def _run(self) -> None:
        reason: BaseException | None = None
        try:
            while self._dead is None:
                self._serve_commands()
                if self._dead is None and self.engine.has_work:
                    self._deliver(self.engine.step())
        except BaseException as error:  # whatever it was, nobody may be left waiting
            reason = error
            logger.exception("the engine has died")
        if reason is not None:
            self._end(EngineDeadError(f"the engine has died: {type(reason).__name__}: {reason}"))
        self._drain()
        try:
            self.engine.close()
        except Exception:
            logger.exception("closing the engine failed")

    def _serve_commands(self) -> None:
        """Runs what is queued; waits for a command when there is nothing else to do."""
        while self._dead is None:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return
            if command is not None:
                command()

    def _add(self, ticket: Ticket, submissions: Sequence[Submission]) -> None:
        if self._dead is not None:
            raise self._death()
        if self._num_running == 0:
            self._last_token_s = time.monotonic()
        try:
            for item in submissions:
                added = self.engine.add(
                    item.prompt_ids, item.params, drafter=item.drafter, prediction=item.prediction, scheduling=item.scheduling
                )
                for request_id in added:
                    self._tickets[request_id] = (ticket, len(ticket.choices))
                    ticket.choices.append(request_id)
        except Exception:
            self._abort(ticket.choices)
            raise
        self._num_running = len(self._tickets)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._tickets.pop(request_id, None) is not None:
                self.engine.abort(request_id)
        self._num_running = len(self._tickets)

    def _deliver(self, events: Sequence[Event]) -> None:
        batch = []
        for event in events:
            entry = self._tickets.get(event.request_id)
            if entry is None:
                continue  # aborted; its last event has no reader
            if event.finish_reason is not None:
                del self._tickets[event.request_id]
            batch.append((*entry, event))
        if batch:
            self._last_token_s = time.monotonic()
            self._num_running = len(self._tickets)
            self._notify(_hand_out, batch)

    def _end(self, error: EngineDeadError) -> None:
        with self._lock:
            self._dead = self._dead or error
            self._commands.put(None)  # wakes the thread

    def _drain(self) -> None:
        """After the end: no command may wait for ever, no stream may miss the news."""
        error = self._death()
        for ticket in {id(ticket): ticket for ticket, _ in self._tickets.values()}.values():
            self._notify(ticket.events.put_nowait, error)
        for request_id in list(self._tickets):
            try:
                self.engine.abort(request_id)
            except Exception:
                logger.exception("aborting %s failed", request_id)
        self._tickets.clear()
        self._num_running = 0
        while True:
            try:
                command = self._commands.get(block=False)
            except queue.Empty:
                return
            if command is not None:
                command()

    # From any thread.

    def _death(self) -> EngineDeadError:
        return self._dead or EngineDeadError("the engine has ended")

    def _post(self, command: Callable[[], None]) -> bool:
        """Queues a command; False when nobody will run it."""
        with self._lock:
            if self._dead is not None:
                return False
            self._commands.put(command)
            return True

    def _notify(self, callback: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.debug("the event loop has closed; nobody is left to tell")


def _hand_out(batch: Sequence[tuple[Ticket, int, Event]]) -> None:
    for ticket, index, event in batch:
        ticket.events.put_nowait((index, event))
