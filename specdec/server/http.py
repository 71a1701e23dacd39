"""HTTP plumbing: bodies with a limit, server-sent events, and giving up when the client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.server.errors import ApiError, from_exception

T = TypeVar("T")

_DRAIN_FACTOR = 16  # a client that is still sending cannot read our answer; past this many limits it has to


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready."""


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises ApiError 413 past `limit` bytes, ClientGoneError when the client goes before its end."""
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > _DRAIN_FACTOR * limit:
                break
    except ClientDisconnect:
        raise ClientGoneError from None
    if size > limit:
        raise ApiError(413, f"the body is larger than the {limit} bytes that this server takes", code="body_too_large")
    return b"".join(chunks)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, cancelling it when the client disconnects. Raises ClientGoneError then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Chunks as server-sent events, then `[DONE]`. An error after the start becomes an `error` event, the last one.

    Args:
        chunks: JSON objects.
        on_close: called once, however the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.chunks = chunks
        self.on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGoneError, OSError):
            pass  # nobody is left to tell
        finally:
            self.on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self.chunks:
                await _send_event(send, json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
            await _send_event(send, "[DONE]")
        except OSError:
            raise
        except Exception as error:
            await _send_event(send, json.dumps(from_exception(error).body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
