"""Requests that wait, in the order they will run: by priority, then by when they should have their first token."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from specdec.request import Request

PATIENCE_S = 10.0
"""The time to the first token that a request without a target is taken to have: those with a tighter one go first, for a while."""


def order(request: Request) -> tuple[int, float, str]:
    """Sort key: lower runs first and is preempted last. Among requests without targets it is the order of arrival."""
    patience_s = PATIENCE_S if request.target_ttft_s is None else min(request.target_ttft_s, PATIENCE_S)
    return (request.priority, request.arrival_s + patience_s, request.id)


class RequestQueue:
    """Waiting requests, sorted. A preempted request keeps its arrival and so comes back to its place."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def push(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=order)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def find(self, request_id: str) -> Request | None:
        return next((request for request in self._requests if request.id == request_id), None)
