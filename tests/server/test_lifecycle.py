"""Disconnects, a dead or stuck engine, shutdown: nobody waits for ever and nothing runs for nobody."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from specdec.server.options import ServerOptions

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
Wait = Callable[..., None]


@pytest.fixture
def engine(own_engine: Any) -> Any:
    return own_engine


@pytest.fixture
def client(own_client: httpx.Client) -> httpx.Client:
    return own_client


@pytest.fixture
def gate(engine: Any) -> threading.Event:
    """While it is not set the engine stands still after its first step."""
    event = threading.Event()
    steps = 0

    def tick() -> None:
        nonlocal steps
        steps += 1
        if steps > 1:
            event.wait(10)

    engine.tick = tick
    return event


def test_disconnect_from_a_stream_aborts(client: httpx.Client, engine: Any, wait_until: Wait) -> None:
    engine.tick = lambda: time.sleep(0.05)
    with client.stream("POST", "/v1/chat/completions", json={**CHAT, "n": 2, "stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: not engine.running)
    assert [kind for kind, _ in engine.log] == ["add", "abort", "abort"]


def test_disconnect_from_a_whole_answer_aborts(client: httpx.Client, engine: Any, wait_until: Wait) -> None:
    engine.tick = lambda: time.sleep(0.05)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=CHAT, timeout=0.2)
    wait_until(lambda: not engine.running)
    assert [kind for kind, _ in engine.log] == ["add", "abort"]
    engine.tick = lambda: None
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_client_that_goes_while_sending_its_body_is_no_error(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.2)
    time.sleep(0.2)
    assert client.get("/health").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_dead_engine_answers_everyone(client: httpx.Client, engine: Any, wait_until: Wait) -> None:
    def die() -> None:
        time.sleep(0.05)
        if len(engine.running) == 4:
            raise RuntimeError("out of luck")

    engine.tick = die
    with ThreadPoolExecutor(4) as pool:
        whole = [pool.submit(client.post, "/v1/chat/completions", json=CHAT) for _ in range(3)]
        streamed = pool.submit(client.post, "/v1/chat/completions", json={**CHAT, "stream": True})
        assert [future.result().status_code for future in whole] == [503] * 3
        assert "out of luck" in whole[0].result().json()["error"]["message"]
        assert streamed.result().text.rstrip().splitlines()[-1].startswith('data: {"error"')
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 503
    assert client.get("/health").status_code == 503
    assert client.get("/v1/status").status_code == 503
    assert client.get("/v1/models").status_code == 200
    wait_until(lambda: engine.closed)


def test_health_tells_a_stall(client: httpx.Client, engine: Any, gate: threading.Event, wait_until: Wait) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/v1/chat/completions", json=CHAT)
        wait_until(lambda: client.get("/health").status_code == 503)
        assert client.get("/health").json() == {"status": "stalled", "running": 1}
        gate.set()
        assert answer.result().status_code == 200
    assert client.get("/health").status_code == 200


def test_failure_of_one_request_is_its_own(client: httpx.Client, engine: Any) -> None:
    from dataclasses import replace

    step = engine.step

    def poisoned() -> list[Any]:
        events = step()
        return [replace(event, finish_reason="error", error="NaN") if event.request_id == "r1-0" else event for event in events]

    engine.step = poisoned
    failed = client.post("/v1/chat/completions", json=CHAT)
    assert failed.status_code == 500
    assert "NaN" in failed.json()["error"]["message"]
    engine.running.clear()
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_shutdown_ends_streams_and_closes_the_engine(engine: Any, serving: Any, wait_until: Wait) -> None:
    engine.tick = lambda: time.sleep(0.1)
    with ThreadPoolExecutor(1) as pool:
        with serving(engine, ServerOptions(port=0)) as (client, server):
            streamed = pool.submit(client.post, "/v1/chat/completions", json={**CHAT, "stream": True})
            wait_until(lambda: bool(engine.running))
            start = time.monotonic()
            server.handle_exit(15, None)
            lines = streamed.result().text.rstrip().splitlines()
        assert "shutting down" in lines[-1]
        assert time.monotonic() - start < 5
    assert engine.closed
    assert not engine.running
