"""An OpenAI-compatible HTTP server. `create_app` builds it around an engine, `serve` runs it until a signal."""

from __future__ import annotations

from specdec.server.options import ServerOptions

__all__ = ["ServerOptions"]
