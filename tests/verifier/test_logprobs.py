"""Scores of single positions: raw, sorted, ties by the lower id."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.plan import BatchPlan, Row
from specdec.request import Request, SamplingParams
from specdec.tree import EMPTY, DraftTree
from specdec.verifier.base import Decision, RowNodes, StepLogits
from specdec.verifier.logprobs import emitted_logprobs, prompt_logprobs, score, wanted_rows


def make_request(num_prompt: int, **params: int) -> Request:
    return Request("r", list(range(num_prompt)), num_prompt, SamplingParams(**params), 0, 100)


@pytest.mark.parametrize("count", [0, 1, 4, 30])
def test_scores_are_the_log_softmax(count: int) -> None:
    logits = torch.randn(3, 20) * 5
    tokens = [3, 0, 19]
    entries = score(logits, tokens, count)
    want = torch.log_softmax(logits.double(), -1)
    for entry, token, row in zip(entries, tokens, want, strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [token for token, _ in entry.top] == row.argsort(descending=True)[:count].tolist()
        assert [value for _, value in entry.top] == pytest.approx(row.sort(descending=True).values[:count].tolist(), abs=1e-5)


def test_of_equals_the_lower_id_comes_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0]])
    assert [token for token, _ in score(logits, [0], 5)[0].top] == [1, 3, 6, 2, 4]


def test_only_the_walk_of_rows_that_ask_is_scored() -> None:
    logits = torch.randn(9, 10)
    tree = DraftTree(np.array([4, 5, 6], dtype=np.int32), np.array([-1, -1, 1], dtype=np.int32))
    rows = [
        RowNodes(0, make_request(3), tree, 0, 3),
        RowNodes(1, make_request(3, logprobs=2), tree, 4, 3),
        RowNodes(2, make_request(3, logprobs=2), EMPTY, 8, 3),
    ]
    assert wanted_rows(rows) == [4, 5, 6, 7, 8]
    decisions = {0: Decision((), 1), 1: Decision((1, 2), 9), 2: Decision((), -1)}
    found = emitted_logprobs(rows, decisions, StepLogits(logits))
    assert list(found) == [1]
    assert found[1] == score(logits[[4, 6, 7]], [5, 6, 9], 2)


@pytest.mark.parametrize(
    ("cached", "pending", "num_scored", "tokens"),
    [(0, 10, 1, range(1, 10)), (0, 4, 1, range(1, 5)), (4, 4, 5, range(5, 9)), (8, 2, 9, [9]), (0, 6, 4, range(4, 7)), (0, 3, 6, [])],
)
def test_each_prompt_token_is_scored_once(cached: int, pending: int, num_scored: int, tokens: range) -> None:
    request = make_request(10, prompt_logprobs=0)
    request.num_scored = num_scored
    plan = BatchPlan((Row(make_request(5), 0, 5), Row(request, cached, pending)))
    logits = torch.randn(1 + pending, 10)
    entries = prompt_logprobs(plan, [EMPTY, EMPTY], logits)[1]
    assert [entry.token for entry in entries] == list(tokens)
    want = torch.log_softmax(logits, -1)
    assert [entry.logprob for entry in entries] == pytest.approx([float(want[token - cached, token]) for token in tokens])
