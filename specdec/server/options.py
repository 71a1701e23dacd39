"""Options of the HTTP server, as opposed to the engine's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specdec.errors import ConfigError


@dataclass(frozen=True)
class ServerOptions:
    """Where and how to serve.

    Attributes:
        host: address to bind.
        port: port to bind; 0 takes a free one.
        served_model_name: the name that requests give as `model`; None takes the engine's.
        max_body_bytes: larger request bodies are refused with 413.
        stall_s: `/health` is 503 when requests run and none has got a token for this long.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_body_bytes: int = 4 * 2**20
    stall_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        if not self.stall_s > 0:
            raise ConfigError(f"stall_s must be more than 0, got {self.stall_s}")

    def to_dict(self) -> dict[str, Any]:
        """All options as JSON values."""
        return asdict(self)
