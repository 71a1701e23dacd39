"""A scripted engine behind the real HTTP server, so that the protocol is tested without a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from specdec.config import EngineConfig
from specdec.errors import ContextLengthError, OverloadedError, RequestError
from specdec.plan import Event
from specdec.request import DEFAULT_SCHEDULING, Constraint, RequestStats, SamplingParams, Scheduling
from specdec.server.options import ServerOptions
from specdec.server.run import Server, bind, create_server

SCRIPT = "Grüße, 世界! 🎉 The quick brown fox jumps over the lazy dog."


class CharTokenizer:
    """One id per character; id 0 begins a text."""

    chat_template: str | None = "present"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(char) for char in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in ids if token)

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: object) -> str:
        return "".join(f"{message['role'][0]}:{message['content']};" for message in messages)


class FakeEngine:
    """Answers every request with SCRIPT, three tokens a step, the first two of them accepted drafts.

    Attributes:
        tick: called at the start of every step; a test may sleep, block or raise there.
        log: what was added and aborted, in order.
    """

    def __init__(self) -> None:
        self.config = EngineConfig(drafter="ngram", model="org/fake")
        self.tokenizer: Any = CharTokenizer()
        self.max_model_len = 64
        self.model_name = "fake"
        self.tick: Callable[[], None] = lambda: None
        self.log: list[tuple[str, Any]] = []
        self.full = False
        self.running: dict[str, tuple[SamplingParams, int, RequestStats]] = {}
        self.closed = False
        self.prepared = False
        self.number = 0
        self.scheduled: list[Scheduling] = []

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        drafter: str | None = None,
        prediction: Sequence[int] = (),
        scheduling: Scheduling = DEFAULT_SCHEDULING,
    ) -> list[str]:
        if not prompt_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if len(prompt_ids) >= self.max_model_len:
            raise ContextLengthError(f"the prompt has {len(prompt_ids)} tokens, the limit is {self.max_model_len}")
        if self.full:
            raise OverloadedError("the queue is full")
        if drafter not in (None, "off", "ngram", "prediction"):
            raise RequestError(f"unknown drafter {drafter!r}", param="drafter")
        self.number += 1
        names = [f"r{self.number}-{choice}" for choice in range(params.n)]
        for name in names:
            self.running[name] = (params, 0, RequestStats(cached_prompt_tokens=1))
        self.log.append(("add", {"prompt": list(prompt_ids), "params": params, "drafter": drafter, "prediction": list(prediction)}))
        self.scheduled.append(scheduling)
        return names

    def compile(self, constraint: Constraint) -> None:
        self.log.append(("compile", (threading.current_thread().name, constraint)))
        if constraint.text == "(":
            raise RequestError("unclosed group", param="constraint")

    def prepare_constraints(self) -> None:
        self.prepared = True

    def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None):
            self.log.append(("abort", request_id))

    def step(self) -> list[Event]:
        self.tick()
        events = []
        for name, (params, at, stats) in list(self.running.items()):
            limit = min(len(SCRIPT), params.max_tokens or len(SCRIPT))
            piece = SCRIPT[at : min(at + 3, limit)]
            at += len(piece)
            reason = None if at < limit else "length" if params.max_tokens and limit == params.max_tokens else "stop"
            stats.drafted += 3
            stats.accepted += 2
            if reason:
                del self.running[name]
            else:
                self.running[name] = (params, at, stats)
            events.append(Event(name, tuple(map(ord, piece)), tuple(piece), min(2, len(piece)), stats, reason))
        return events

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def status(self) -> dict[str, Any]:
        return {"waiting": 0, "drafters": {"ngram": {"state": "active"}}}

    def close(self) -> None:
        self.closed = True


@contextmanager
def serving(engine: Any, options: ServerOptions) -> Iterator[tuple[httpx.Client, Server]]:
    """Runs the real server in a thread, on a free port."""
    listener = bind(options)
    server = create_server(engine, options, log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=20) as client:
            yield client, server
    finally:
        server.handle_exit(15, None)
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


def wait_until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Polls until a condition holds; fails when it never does."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


OPTIONS = ServerOptions(port=0, max_body_bytes=1 << 20, stall_s=0.2)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeEngine, httpx.Client]]:
    """One server for the tests of a module; starting one takes longer than most of them."""
    engine = FakeEngine()
    with serving(engine, OPTIONS) as (client, _):
        yield engine, client


@pytest.fixture
def engine(shared: tuple[FakeEngine, httpx.Client]) -> FakeEngine:
    """The shared server's engine, as new."""
    FakeEngine.__init__(shared[0])
    return shared[0]


@pytest.fixture
def client(shared: tuple[FakeEngine, httpx.Client], engine: FakeEngine) -> httpx.Client:
    return shared[1]


@pytest.fixture
def own_engine() -> FakeEngine:
    """An engine for one test, which may break it."""
    return FakeEngine()


@pytest.fixture
def own_client(own_engine: FakeEngine) -> Iterator[httpx.Client]:
    with serving(own_engine, OPTIONS) as (client, _):
        yield client


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., None]:
    return wait_until


@pytest.fixture(name="serving", scope="session")
def serving_fixture() -> Callable[..., Any]:
    return serving
