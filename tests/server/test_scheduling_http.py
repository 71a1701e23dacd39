"""What a request may say over HTTP of how it is to be scheduled."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from specdec.request import Scheduling

BODIES = {
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "fake", "prompt": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
def test_targets_priority_and_user_reach_the_engine(client: httpx.Client, engine: Any, path: str) -> None:
    fields = {"priority": 3, "target_itl_ms": 40, "target_ttft_ms": 900.5, "user": "ada", "speculative": {"max_draft": 2}}
    assert client.post(path, json={**BODIES[path], **fields}).status_code == 200
    assert client.post(path, json=BODIES[path]).status_code == 200
    assert engine.scheduled == [Scheduling(3, 2, 40.0, 900.5, "ada"), Scheduling()]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculative": {"max_draft": -1}}, "speculative.max_draft"),
        ({"speculative": {"max_draft": 1.5}}, "speculative.max_draft"),
        ({"target_itl_ms": 0}, "target_itl_ms"),
        ({"target_ttft_ms": -3}, "target_ttft_ms"),
        ({"target_ttft_ms": "soon"}, "target_ttft_ms"),
        ({"priority": 0.5}, "priority"),
        ({"user": 7}, "user"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_nonsense_is_a_400_that_names_the_field(client: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    answer = client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_usage_tells_the_seconds_by_drafter_and_the_speedup(client: httpx.Client) -> None:
    told = client.post("/v1/completions", json=BODIES["/v1/completions"]).json()["usage"]["speculative"]
    assert told["speedup"] == 1.0
    assert told["draft_by"] == {}
    assert {"sample_s", "commit_s", "host_s"} <= set(told)
