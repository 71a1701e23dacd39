"""The exception tree. Every error this package raises on purpose is one of these.

SpecdecError
├── ConfigError            an option is unknown, ignored or impossible; raised before weights load
├── ModelError             a model folder, file or hub id cannot be used
│   ├── UnknownArchitectureError
│   └── WeightError        a tensor is missing, extra, misshapen, not finite, or its file is cut short
├── DrafterError           a drafter cannot be built, or broke its contract
├── RequestError           one request's own fault; `param` names the field
│   ├── ContextLengthError prompt longer than the model's or the pool's limit
│   └── OverloadedError    refused for load; the same request may succeed later
├── KernelError            a compiled kernel cannot be built or loaded
├── InvariantError         a `check()` found the books do not balance: a bug in this package
└── EngineDeadError        the engine loop has ended; nothing more can be asked of it
"""

from __future__ import annotations


class SpecdecError(Exception):
    """Root of the tree."""


class ConfigError(SpecdecError, ValueError):
    """An option is unknown, ignored or impossible."""


class ModelError(SpecdecError):
    """A model folder, file or hub id cannot be used."""


class UnknownArchitectureError(ModelError):
    """No decoder here is built for this architecture."""


class WeightError(ModelError):
    """A tensor is missing, extra, misshapen or not finite, or its file is cut short."""


class DrafterError(SpecdecError):
    """A drafter cannot be built, or broke its contract."""


class RequestError(SpecdecError, ValueError):
    """One request's own fault.

    Args:
        message: what was wanted, what came and what to do.
        param: the request field at fault, where there is one.
        code: a stable machine-readable word, such as ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt does not fit the model's context or the KV pool."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class OverloadedError(RequestError):
    """Refused for load; the same request may succeed later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="overloaded")


class KernelError(SpecdecError):
    """A compiled kernel cannot be built or loaded."""


class InvariantError(SpecdecError):
    """A `check()` found that the books do not balance: a bug in this package."""


class EngineDeadError(SpecdecError):
    """The engine loop has ended; nothing more can be asked of it."""
