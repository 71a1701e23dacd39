"""Runs the application under uvicorn until SIGINT or SIGTERM."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import uvicorn

from specdec.errors import ConfigError
from specdec.server.app import create_app
from specdec.server.engine_loop import AsyncEngine, EngineLike
from specdec.server.options import ServerOptions

_GRACE_S = 10  # running streams are ended at once; this is for slow clients to take the rest


class Server(uvicorn.Server):
    """Ends the running requests as soon as it is told to stop, so that no stream holds up the exit."""

    def __init__(self, config: uvicorn.Config, engine_loop: AsyncEngine) -> None:
        super().__init__(config)
        self.engine_loop = engine_loop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.engine_loop.stop()
        super().handle_exit(sig, frame)


def bind(options: ServerOptions) -> socket.socket:
    """A bound socket, made before the weights load so that a port in use is noticed at once. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot serve on {options.host}:{options.port}: {error.strerror or error}; choose another --port") from None
    return listener


def serve(engine: EngineLike, options: ServerOptions, listener: socket.socket, *, log_level: str = "info") -> None:
    """Serves until SIGINT or SIGTERM, ends running requests, and returns."""
    server = create_server(engine, options, log_level=log_level)
    with _default_signals_ignored():
        server.run(sockets=[listener])


def create_server(engine: EngineLike, options: ServerOptions, *, log_level: str = "info") -> Server:
    """A uvicorn server around the application, not yet running."""
    app = create_app(engine, options)
    config = uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=_GRACE_S, ws="none", server_header=False)
    return Server(config, app.state.service.loop)


@contextlib.contextmanager
def _default_signals_ignored() -> Iterator[None]:
    """uvicorn raises the signal that ended it again when it is done; a wanted exit is not an error, so nobody hears it."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
