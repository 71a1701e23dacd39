"""The parameters that change logits, at every node of random trees, against one node at a time written out in loops."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.request import Request, SamplingParams
from specdec.tree import EMPTY, DraftTree
from specdec.verifier.base import RowNodes, StepLogits
from specdec.verifier.history import BadWords, TokenCounts
from specdec.verifier.transforms import ParameterTransform

VOCABULARY = 12
END = 3


def make_request(params: SamplingParams, tokens: Sequence[int] = (1, 2, 2), num_prompt: int = 3) -> Request:
    words = tuple(word for word in params.bad_words if not isinstance(word, str))
    return Request("r", list(tokens), num_prompt, params, 0, 1000, eos_token_ids=frozenset({END}), bad_words=words)


def make_row(request: Request, tree: DraftTree = EMPTY, start: int = 0, index: int = 0) -> RowNodes:
    return RowNodes(index, request, tree, start, len(request.tokens))


def apply(transform: ParameterTransform, rows: Sequence[RowNodes], logits: Tensor) -> StepLogits:
    step = StepLogits(logits.clone())
    transform.apply(rows, step)
    return step


def expected(request: Request, path: Sequence[int], logits: Tensor) -> Tensor:
    """What the logits of one node should become, token by token."""
    params = request.params
    out = logits.clone()
    output = [*request.tokens[request.num_prompt :], *path]
    text = [*request.tokens, *path]
    for token in range(VOCABULARY):
        value = np.float32(out[token].item())
        if token in text:
            value = value / np.float32(params.repetition_penalty) if value > 0 else value * np.float32(params.repetition_penalty)
        value -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        value -= np.float32(params.presence_penalty) * np.float32(token in output)
        value += np.float32(sum(addend for biased, addend in params.logit_bias if biased == token))
        out[token] = value.item()
    for processor in params.logits_processors:
        out = processor(text, out)
    for token in range(VOCABULARY):
        banned = bool(params.allowed_token_ids) and token not in params.allowed_token_ids
        banned |= any(word[-1] == token and text[len(text) - len(word) + 1 :] == list(word[:-1]) for word in request.bad_words)
        banned |= len(output) < params.min_tokens and token in {END, *params.stop_token_ids}
        if banned:
            out[token] = -torch.inf
    return out


def random_tree(random: np.random.Generator) -> DraftTree:
    size = int(random.integers(0, 9))
    parents = [int(random.integers(-1, node)) if node else -1 for node in range(size)]
    return DraftTree(random.integers(0, VOCABULARY, size, dtype=np.int32), np.asarray(parents, dtype=np.int32))


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"repetition_penalty": 0.8, "presence_penalty": -1.1, "frequency_penalty": 0.3},
    {"logit_bias": {0: 3.0, 5: -2.5, 7: float("-inf")}},
    {"logit_bias": [(4, 1.0), (4, 2.0)]},
    {"allowed_token_ids": [0, 2, 2, 9]},
    {"bad_words": [[4], [1, 2], [2, 2], [2, 2, 5], [5, 6, 7]]},
    {"min_tokens": 4, "stop_token_ids": [6]},
    {"logits_processors": [lambda tokens, logits: logits - len(tokens), lambda tokens, logits: logits.mul_(1 + tokens[-1])]},
    {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {1: -1.0, 3: 2.0},
        "allowed_token_ids": [1, 2, 3, 4, 5, 6],
        "bad_words": [[2], [1, 3]],
        "min_tokens": 6,
        "logits_processors": [lambda tokens, logits: logits * 2],
    },
]


@pytest.mark.parametrize("seed", range(6))
def test_every_node_equals_the_loops_over_several_steps(seed: int) -> None:
    """All parameter sets at once in a batch, whose requests grow by some tokens between the steps."""
    random = np.random.default_rng(seed)
    transform = ParameterTransform()
    requests = [
        make_request(SamplingParams(**parameters), random.integers(0, VOCABULARY, size).tolist(), size)
        for parameters in PARAMETERS
        for size in (1, 7)
    ]
    for _ in range(4):
        rows: list[RowNodes] = []
        for index, request in enumerate(requests):
            rows.append(make_row(request, random_tree(random), rows[-1].start + rows[-1].count if rows else 0, index))
        logits = torch.from_numpy(random.normal(0, 3, (rows[-1].start + rows[-1].count, VOCABULARY)).astype(np.float32))
        step = apply(transform, rows, logits)
        for row in rows:
            for node in range(-1, len(row.tree)):
                place = row.start + 1 + node
                want = expected(row.request, row.history(node), logits[place])
                assert torch.equal(step.current[place], want), (row.request.params, node)
        for request in requests:
            request.tokens += random.integers(0, VOCABULARY, int(random.integers(1, 4))).tolist()


def test_rows_that_ask_for_nothing_are_neither_copied_nor_changed() -> None:
    logits = torch.randn(3, VOCABULARY)
    before = logits.clone()
    step = StepLogits(logits, keep=[0])
    plain = make_row(make_request(SamplingParams(seed=1, top_p=0.5, stop_token_ids=(4,))), DraftTree.chain([1, 2]))
    ParameterTransform().apply([plain], step)
    assert step.current is logits and torch.equal(logits, before)
    other = make_row(make_request(SamplingParams(logit_bias={1: 1.0})), start=2, index=1)
    ParameterTransform().apply([make_row(plain.request, DraftTree.chain([1])), other], step)
    assert torch.equal(step.current[:2], before[:2])
    assert not torch.equal(step.current[2], before[2])


def test_raw_values_outlive_the_edits_of_the_rows_that_are_kept() -> None:
    logits = torch.randn(3, VOCABULARY)
    before = logits.clone()
    step = StepLogits(logits, keep=[2, 0])
    assert torch.equal(step.raw([0, 2]), before[[0, 2]])
    step.edit().zero_()
    assert torch.equal(step.raw([0, 2]), before[[0, 2]])
    assert step.current is logits and not logits.any()


def test_a_state_ends_with_its_request() -> None:
    transform = ParameterTransform()
    request = make_request(SamplingParams(frequency_penalty=1.0))
    apply(transform, [make_row(request)], torch.zeros(1, VOCABULARY))
    assert len(transform._states) == 1
    del request
    gc.collect()
    assert len(transform._states) == 0


def raising(_tokens: Sequence[int], _logits: Tensor) -> Tensor:
    raise ValueError("no such luck")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (raising, "logits processor raising failed: ValueError: no such luck"),
        (lambda _, logits: logits[:-1], r"must return a tensor of shape \[12\], got shape \[11\]"),
        (lambda _, logits: None, "got NoneType"),
        (lambda _, logits: logits * torch.nan, "returned NaN"),
    ],
)
def test_a_failing_processor_fails_its_own_row(processor: Any, message: str) -> None:
    rows = [
        make_row(make_request(SamplingParams(logits_processors=(processor,)))),
        make_row(make_request(SamplingParams(logit_bias={1: 1.0})), start=1, index=1),
    ]
    step = apply(ParameterTransform(), rows, torch.zeros(2, VOCABULARY))
    assert list(step.errors) == [0]
    assert re.search(message, step.errors[0])
    assert step.current[0].isnan().all()
    assert step.current[1].isfinite().all()


def test_a_processor_that_fails_at_a_draft_node_only_ends_the_draft_there() -> None:
    def picky(tokens: Sequence[int], logits: Tensor) -> Tensor:
        assert tokens[-1] != 7
        return logits

    row = make_row(make_request(SamplingParams(logits_processors=(picky,))), DraftTree.chain([4, 7, 5]))
    step = apply(ParameterTransform(), [row], torch.zeros(4, VOCABULARY))
    assert step.errors == {}
    assert step.current.isnan().all(1).tolist() == [False, False, True, False]


def test_a_processor_cannot_change_the_request() -> None:
    def rude(tokens: Any, logits: Tensor) -> Tensor:
        tokens.clear()
        return logits

    row = make_row(make_request(SamplingParams(logits_processors=(rude,))), DraftTree.chain([4]))
    apply(ParameterTransform(), [row], torch.zeros(2, VOCABULARY))
    assert row.request.tokens == [1, 2, 2]


def test_counts_take_every_token_once() -> None:
    class Watched(list[int]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Watched.reads += 1 if isinstance(index, int) else len(range(*index.indices(len(self))))
            return super().__getitem__(index)

    counts = TokenCounts(100, with_prompt=True)
    tokens = Watched([*range(100), *[5] * 200])
    for length in range(100, 301):
        counts.update(tokens, length)
    assert Watched.reads == 300
    assert counts.count(5) == 200 and counts.count(6) == 0 and counts.count(777) == 0
    assert sorted(counts.ids.tolist()) == list(range(100))
    assert counts.counts.sum() == 200


def test_counts_grow_with_the_output() -> None:
    tokens = [7, *np.random.default_rng(0).integers(0, 900, 3000).tolist()]
    counts = TokenCounts(1, with_prompt=False)
    for length in range(1, len(tokens) + 1, 50):
        counts.update(tokens, length)
    counts.update(tokens, len(tokens))
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == Counter(tokens[1:])


def test_bad_words_span_prompt_output_and_path() -> None:
    words = BadWords([[9], [1, 2, 3], [2, 3, 4]])
    assert words.after([1, 2], 2, []) == [9, 3]
    assert words.after([1, 2, 8], 2, []) == [9, 3]
    assert words.after([1], 1, [2]) == [9, 3]
    assert words.after([0, 1], 2, [2, 3]) == [9, 4]
    assert words.after([1], 1, [3]) == [9]
    assert BadWords([[2, 2]]).after([], 0, []) == []
