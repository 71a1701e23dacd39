"""Errors as OpenAI clients expect them: a 4xx or 5xx status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from specdec.errors import EngineDeadError, OverloadedError, RequestError


class ApiError(Exception):
    """An error with an HTTP status.

    Args:
        status: HTTP status.
        message: what was wanted, what came and what to do.
        param: the request field at fault, where there is one.
        code: a stable machine-readable word.
        headers: to send with it.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def from_exception(error: Exception) -> ApiError:
    """The HTTP face of an error of this package; anything unforeseen is a 500 that does not leak its text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return ApiError(503, str(error), code=error.code, headers={"Retry-After": "1"})
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")
