"""Sampling parameters that change logits before temperature: penalties, bias, custom processors, bans.

Applied at every node with the history of the node's own path, so that a node is what a decode without drafts would be at
its place. The order is repetition penalty, presence and frequency penalties, logit_bias, logits processors, bans
(allowed_token_ids, bad_words, min_tokens). All updates are sparse, gathered over the rows of a step and made in one pass;
only `allowed_token_ids` and processors write whole rows. Rows that ask for none of it are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.request import LogitsProcessor, Request, SamplingParams
from specdec.verifier.base import RowNodes, StepLogits
from specdec.verifier.history import BadWords, TokenCounts

Cells = NDArray[np.int64]  # row * vocabulary + id


class _State:
    """What one request's parameters come to, prepared once."""

    def __init__(self, request: Request) -> None:
        params = request.params
        penalises = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self.counts = TokenCounts(request.num_prompt, with_prompt=params.repetition_penalty != 1) if penalises else None
        bias: dict[int, float] = {}
        for token, addend in params.logit_bias:
            bias[token] = bias.get(token, 0.0) + addend
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_addends = np.fromiter(bias.values(), np.float32, len(bias))
        self.allowed = torch.tensor(sorted(set(params.allowed_token_ids)), dtype=torch.int64) if params.allowed_token_ids else None
        self.bad_words = BadWords(request.bad_words) if request.bad_words else None
        self.end_ids = sorted(request.eos_token_ids | set(params.stop_token_ids)) if params.min_tokens else []


class ParameterTransform:
    """Implements `specdec.verifier.base.Transform` for the parameters of `SamplingParams`."""

    def __init__(self) -> None:
        # Weak, so that a state outlives a preemption and ends with its request.
        self._states: WeakKeyDictionary[Request, _State] = WeakKeyDictionary()

    def apply(self, rows: Sequence[RowNodes], logits: StepLogits) -> None:
        asking = [(row, self._state(row.request)) for row in rows if _asks(row)]
        if not asking:
            return
        edited = logits.edit()
        _penalise([(row, state.counts) for row, state in asking if state.counts is not None], edited)
        _add_bias([(row, state) for row, state in asking if len(state.bias_ids)], edited)
        for row, _ in asking:
            if row.request.params.logits_processors:
                _process(row, logits)
        for row, state in asking:
            if state.allowed is not None:
                _allow_only(edited[row.start : row.start + row.count], state.allowed)
        _ban(asking, edited)

    def _state(self, request: Request) -> _State:
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = _State(request)
        return state


def _asks(row: RowNodes) -> bool:
    request, params = row.request, row.request.params
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or bool(params.logit_bias or params.logits_processors or params.allowed_token_ids or request.bad_words)
        or row.length - request.num_prompt < params.min_tokens
    )


def _penalise(rows: Sequence[tuple[RowNodes, TokenCounts]], logits: Tensor) -> None:
    """Penalties for the committed text at every node, then once more, with higher counts, for the tokens of each path.

    Args:
        rows: with the counts of their committed tokens, which are brought up to date.
        logits: float32 [R, vocabulary], changed in place.
    """
    if not rows:
        return
    vocabulary = logits.shape[1]
    cells: list[Cells] = []
    counts: list[NDArray[np.float32]] = []
    own_cells: list[Cells] = []
    own_counts: list[NDArray[np.float32]] = []
    for row, committed in rows:
        committed.update(row.request.tokens, row.length)
        nodes = np.arange(row.start, row.start + row.count, dtype=np.int64) * vocabulary
        cells.append((nodes[:, None] + committed.ids).ravel())
        counts.append(np.tile(committed.counts, row.count))
        places, totals = _path_counts(row, committed, vocabulary)
        own_cells.append(places)
        own_counts.append(totals)
    params = [row.request.params for row, _ in rows]
    flat = logits.view(-1)
    # both read the logits before either writes them
    writes = [_penalised(flat, *part, params) for part in ((cells, counts), (own_cells, own_counts))]
    for index, values in writes:
        flat.index_copy_(0, index, values)


def _path_counts(row: RowNodes, committed: TokenCounts, vocabulary: int) -> tuple[Cells, NDArray[np.float32]]:
    """The cells of each node's own path tokens, and how often each of those occurs in output and path together."""
    cells: list[int] = []
    totals: list[float] = []
    paths: list[dict[int, float]] = []
    for node, (parent, token) in enumerate(zip(row.tree.parents.tolist(), row.tree.tokens.tolist(), strict=True)):
        path = dict(paths[parent]) if parent >= 0 else {}
        path[token] = path.get(token, committed.count(token)) + 1
        paths.append(path)
        first = (row.start + 1 + node) * vocabulary
        cells.extend(first + seen for seen in path)
        totals.extend(path.values())
    return np.asarray(cells, dtype=np.int64), np.asarray(totals, dtype=np.float32)


def _penalised(
    flat: Tensor, cells: Sequence[Cells], counts: Sequence[NDArray[np.float32]], params: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """Where, and what the logits of tokens that were seen become; `params` has the parameters of each part of `cells`."""
    sizes = torch.tensor([len(part) for part in cells])

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(sizes).to(flat.device)

    index = torch.from_numpy(np.concatenate(cells)).to(flat.device)
    count = torch.from_numpy(np.concatenate(counts)).to(flat.device)
    values = flat.index_select(0, index)
    repetition = column([p.repetition_penalty for p in params])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= column([p.frequency_penalty for p in params]) * count
    values -= column([p.presence_penalty for p in params]) * (count > 0)
    return index, values


def _add_bias(rows: Sequence[tuple[RowNodes, _State]], logits: Tensor) -> None:
    if not rows:
        return
    cells, addends = [], []
    for row, state in rows:
        nodes = np.arange(row.start, row.start + row.count, dtype=np.int64) * logits.shape[1]
        cells.append((nodes[:, None] + state.bias_ids).ravel())
        addends.append(np.tile(state.bias_addends, row.count))
    index = torch.from_numpy(np.concatenate(cells)).to(logits.device)
    logits.view(-1).index_add_(0, index, torch.from_numpy(np.concatenate(addends)).to(logits.device))


def _process(row: RowNodes, logits: StepLogits) -> None:
    """Runs a request's own processors at every node; one that fails ends its request, and nothing else."""
    committed = row.request.tokens[: row.length]
    for node in range(-1, len(row.tree)):
        current = logits.edit()[row.start + 1 + node]
        history = committed + row.history(node)
        for processor in row.request.params.logits_processors:
            problem = _run_processor(processor, history, current)
            if problem is not None:
                logits.fail(row, node, problem)
                break


def _run_processor(processor: LogitsProcessor, history: Sequence[int], logits: Tensor) -> str | None:
    """Applies a processor to one node's logits, float32 [vocabulary], in place; returns what is wrong with its answer."""
    name = f"logits processor {getattr(processor, '__qualname__', type(processor).__qualname__)}"
    try:
        result = processor(list(history), logits)
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            return f"{name} must return a tensor of shape {list(logits.shape)}, got {got}"
        if result is not logits:
            logits.copy_(result)
    except Exception as error:  # a user's code may raise anything, and may cost its own request only
        return f"{name} failed: {type(error).__name__}: {error}"
    return f"{name} returned NaN" if bool(logits.isnan().any()) else None


def _allow_only(nodes: Tensor, allowed: Tensor) -> None:
    """Bans all but some ids.

    Args:
        nodes: float32 [n, vocabulary], changed in place.
        allowed: int64 [m].
    """
    ids = allowed.to(nodes.device)
    kept = nodes[:, ids]
    nodes.fill_(-torch.inf)
    nodes.index_copy_(1, ids, kept)


def _ban(rows: Sequence[tuple[RowNodes, _State]], logits: Tensor) -> None:
    """Bans what bad_words forbid after each node's text, and the end of outputs shorter than min_tokens."""
    cells: list[int] = []
    for row, state in rows:
        missing = row.request.params.min_tokens - (row.length - row.request.num_prompt)
        if state.bad_words is None and missing <= 0:
            continue
        for node, depth in enumerate((0, *row.tree.depths().tolist())):
            banned = state.bad_words.after(row.request.tokens, row.length, row.history(node - 1)) if state.bad_words else []
            if depth < missing:
                banned += state.end_ids
            first = (row.start + node) * logits.shape[1]
            cells.extend(first + token for token in banned if token < logits.shape[1])
    if cells:
        logits.view(-1)[torch.tensor(cells, device=logits.device)] = -torch.inf
