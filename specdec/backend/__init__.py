"""Devices. `create_backend` picks one; the contract is in `base.py`."""

from __future__ import annotations

from specdec.backend.base import Backend
from specdec.errors import ConfigError


def create_backend(device: str) -> Backend:
    """The backend of a torch device string, or of the best device for `auto`.

    Raises:
        ConfigError: no backend runs on that device.
    """
    if device not in ("auto", "cpu"):
        raise ConfigError(f"device must be auto or cpu, got {device!r}")
    from specdec.backend.cpu import CPUBackend

    return CPUBackend()
