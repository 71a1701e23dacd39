"""A smaller model with the same tokenizer as the drafter: `model:PATH`.

It keeps KV of its own under the requests' block tables. As everywhere, it forwards `tokens[cached:]`, then one token
per further node:

    slots    |t0 t1 ... t(c-1)|t(c) ... t(L-1)|d0 d1 ... d(k-2)|          d(k-1) is proposed, and not forwarded
             |<--- cached --->|<-- pending -->|<- speculative ->|

Once the step is decided, the speculative tokens that were accepted are committed ones, whose KV is in place: they join
the cached. The rest is overwritten.

A tree (`drafters.shape`) is forwarded anew at every level, from the last committed token on, since its nodes see only
their own ancestors. What is accepted of it, beyond a chain of first nodes, is forwarded again as pending.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.config import DTYPES, EngineConfig
from specdec.drafters.base import Drafter, DrafterContext, DraftOutcome, DraftRow
from specdec.drafters.shape import MAX_DEPTH, num_nodes, parse_widths
from specdec.drafters.vocabulary import tokenizer_fingerprint
from specdec.errors import ConfigError, DrafterError, SpecdecError
from specdec.kernels.cpu_ops import log_sum_exp
from specdec.models.precision import AUTO_DRAFT
from specdec.pack import PackRow
from specdec.plan import DraftNeeds
from specdec.runner import ModelRunner
from specdec.tree import EMPTY, DraftTree

if TYPE_CHECKING:
    from specdec.models import LoadedModel

DEFAULT_DEPTH = 4
_numbers = itertools.count(1)  # tells the KV of two drafters of one model apart


def check_options(
    target: str,
    depth: int | None = None,
    tree: str | None = None,
    greedy: bool = False,
    vocab: int | None = None,
    dtype: str | None = None,
) -> None:
    """Raises ConfigError unless the options of `load_draft_model` can be met and a target that looks like a path exists."""
    _widths(depth, tree)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"drafter 'model': dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if vocab is not None and vocab < 1:
        raise ConfigError(f"drafter 'model': vocab must be at least 1 token id, got {vocab}")
    path = Path(target).expanduser()
    looks_like_path = target.endswith(".gguf") or target.startswith((os.sep, ".", "~"))
    if looks_like_path and not path.exists():
        raise ConfigError(f"drafter 'model': no such model file or folder: {target}")


def _widths(depth: int | None, tree: str | None) -> tuple[int, ...]:
    """Children per node of each level."""
    if tree is not None:
        if depth is not None:
            raise ConfigError(f"drafter 'model': tree={tree} says how deep it is, so depth={depth} cannot be given beside it")
        try:
            return parse_widths(tree)
        except ConfigError as error:
            raise ConfigError(f"drafter 'model': tree: {error}") from None
    depth = DEFAULT_DEPTH if depth is None else depth
    if not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(f"drafter 'model': depth must be between 1 and {MAX_DEPTH}, got {depth}")
    return (1,) * depth


def load_draft_model(
    context: DrafterContext,
    target: str,
    depth: int | None = None,
    tree: str | None = None,
    greedy: bool = False,
    vocab: int | None = None,
    dtype: str | None = None,
) -> DraftModelDrafter:
    """Loads a model and drafts with it.

    Args:
        context: what drafters are built with.
        target: hub id, folder or `.gguf` file.
        depth: nodes of a chain, 4 where neither is given.
        tree: children per level, such as `4-1-1-1` (16 nodes).
        greedy: propose the most probable tokens even where the request samples.
        vocab: propose only the first so many token ids, see `specdec.models.shortlist`; None for all.
        dtype: one of `specdec.config.DTYPES`; None leaves it to `draft_dtype`.

    Raises:
        ConfigError: an option cannot be met.
        DrafterError: the model cannot be used, or its tokenizer is not the target's.
    """
    from specdec.models import load_model
    from specdec.models.shortlist import shorten_vocabulary

    check_options(target, depth, tree, greedy, vocab, dtype)
    dtype = draft_dtype(context.config, target, dtype)
    try:
        loaded = load_model(target, dtype=dtype, device=context.backend.device, max_positions=context.max_model_len)
    except SpecdecError as error:
        raise DrafterError(f"drafter model:{target}: {error}") from error
    if vocab is not None:
        shorten_vocabulary(loaded.model, vocab)
    return DraftModelDrafter(context, loaded, depth, name=f"model:{target}", tree=tree, greedy=greedy)


def draft_dtype(config: EngineConfig, target: str, own: str | None) -> str:
    """What a draft model runs in: what its spec says, else what the engine does; with `auto` in less bits than a target would.

    The target's own file runs as the target does: who drafts with it wants to see every draft accepted.
    """
    if own is not None:
        return own
    return AUTO_DRAFT if config.dtype == "auto" and target != config.model else config.dtype


@dataclass
class _Draft:
    """One row while it is being drafted.

    Attributes:
        row: the request's row, as the sampler is to see it.
        index: its place among all rows.
        size: the most nodes.
        depth: the most levels.
        done: committed tokens whose KV is in the pool.
        front: nodes whose children come next, the last ones so far; -1 is the root.
        tokens: nodes so far.
        parents: of each.
        confidence: the draft model's own probability of each.
        q: what each was drawn from, where the row wants to know.
        forwarded: leading nodes that stand in the pool behind the committed tokens.
    """

    row: DraftRow
    index: int
    size: int
    depth: int
    done: int
    front: list[int] = field(default_factory=lambda: [-1])
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    forwarded: int = 0

    @property
    def pending(self) -> int:
        return len(self.row.tokens) - self.done

    @property
    def room(self) -> int:
        return self.size - len(self.tokens)

    def tree(self) -> DraftTree:
        if not self.tokens:
            return EMPTY
        tokens, parents = (np.asarray(values, dtype=np.int32) for values in (self.tokens, self.parents))
        return DraftTree(tokens, parents, np.asarray(self.confidence, dtype=np.float32), torch.stack(self.q) if self.q else None)

    def leading(self) -> list[int]:
        """Forwarded nodes that lie in the pool as committed tokens would: those with nothing but their ancestors before them."""
        count = 0
        while count < self.forwarded and self.parents[count] == count - 1:
            count += 1
        return self.tokens[:count]


class DraftModelDrafter(Drafter):
    """Drafts with a model, choosing as the target will: the request's parameters and its noise.

    The shape of a draft never depends on what is drawn, as rules that read q demand.

    Args:
        context: what drafters are built with.
        loaded: the draft model; it may be the target's own.
        depth, tree, greedy: see `load_draft_model`.
        name: for messages and for its KV.

    Raises:
        ConfigError: depth and tree cannot be met.
        DrafterError: the draft model's tokenizer is not the target's.
    """

    needs = DraftNeeds(kv=True, q=True)

    def __init__(
        self,
        context: DrafterContext,
        loaded: LoadedModel,
        depth: int | None = None,
        name: str = "model",
        *,
        tree: str | None = None,
        greedy: bool = False,
    ) -> None:
        fingerprint = tokenizer_fingerprint(loaded.tokenizer)
        if fingerprint is not None and context.tokenizer_fingerprint is not None and fingerprint != context.tokenizer_fingerprint:
            raise DrafterError(
                f"drafter {name}: its tokenizer is not the target's, so that its token ids mean other text; "
                f"take a draft model of the target's own family"
            )
        self._widths = _widths(depth, tree)
        self._greedy = greedy
        self.default_limit = num_nodes(self._widths)
        self._context = context
        specs = loaded.model.attention_specs
        self._kv = context.create_kv(f"{name}#{next(_numbers)}", len(specs), specs[0].num_kv_heads, specs[0].head_dim, loaded.kv_dtype)
        self._runner = ModelRunner(loaded.model, context.backend, self._kv)
        self._max_length = min(loaded.config.max_position_embeddings, context.max_model_len)
        self._speculative: dict[str, tuple[int, list[int]]] = {}  # request -> committed length then, tokens in the pool after it

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        drafts = [draft for index, row in enumerate(rows) if (draft := self._begin(index, row)) is not None]
        trees = [EMPTY] * len(rows)
        if drafts:
            self._draft(drafts, self._catch_up(drafts))
        for draft in drafts:
            self._speculative[draft.row.request_id] = (len(draft.row.tokens), draft.leading())
            trees[draft.index] = draft.tree()
        return trees

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        for outcome in outcomes:
            speculative = self._speculative.pop(outcome.request_id, None)
            if speculative is None:
                continue
            length, tokens = speculative
            kept = 0
            while kept < min(len(tokens), len(outcome.emitted)) and tokens[kept] == outcome.emitted[kept]:
                kept += 1
            if kept and self._kv.cached(outcome.request_id) == length:
                self._kv.set_cached(outcome.request_id, length + kept)

    def forget(self, request_id: str) -> None:
        self._speculative.pop(request_id, None)

    def _begin(self, index: int, row: DraftRow) -> _Draft | None:
        """The draft to be made for a row; None at the draft model's length limit."""
        length = len(row.tokens)
        depth = min(len(self._widths), row.depth, self._max_length - length)
        if depth < 1:
            return None
        if self._greedy:
            row = replace(row, params=replace(row.params, temperature=0.0))
        size = min(num_nodes(self._widths[:depth]), row.limit)
        return _Draft(row, index, size, depth, min(self._kv.cached(row.request_id), length - 1))

    def _catch_up(self, drafts: Sequence[_Draft]) -> Tensor:
        """Forwards all pending tokens, in chunks; returns the logits after the last one, float32 [drafts, vocabulary]."""
        logits: dict[int, Tensor] = {}
        while waiting := [draft for draft in drafts if draft.pending]:
            budget = self._context.config.max_batch_tokens
            batch: list[tuple[_Draft, PackRow]] = []
            for draft in waiting:
                count = min(draft.pending, budget)
                if count:
                    budget -= count
                    tokens = draft.row.tokens[draft.done : draft.done + count]
                    last = count == draft.pending
                    batch.append((draft, PackRow(tokens, draft.done, self._kv.pages(draft.row.request_id), int(last))))
            output = self._runner.forward([packed for _, packed in batch]).logits
            for draft, packed in batch:
                draft.done += len(packed.tokens)
                self._kv.set_cached(draft.row.request_id, draft.done)
            ends = [draft for draft, packed in batch if packed.num_logits]
            if len(ends) == len(drafts):
                return output
            logits.update({draft.index: row for draft, row in zip(ends, output.clone(), strict=True)})  # the next forward overwrites them
        return torch.stack([logits[draft.index] for draft in drafts])

    def _draft(self, drafts: Sequence[_Draft], logits: Tensor) -> None:
        """Draws the nodes level by level, all rows at once; a row that has its nodes drops out."""
        going = list(drafts)
        for level, width in enumerate(self._widths):
            self._grow(going, logits, level, width)
            if level + 1 == len(self._widths):
                return
            going = [draft for draft in going if draft.front and draft.room and level + 1 < draft.depth]
            if not going:
                return
            for draft in going:
                del draft.front[-(-draft.room // self._widths[level + 1]) :]  # those whose children would not fit
            logits = self._runner.forward([self._pack(draft) for draft in going]).logits

    def _pack(self, draft: _Draft) -> PackRow:
        """The forward that gives the logits after the nodes of the front."""
        length, pages = len(draft.row.tokens), self._kv.pages(draft.row.request_id)
        draft.forwarded = draft.front[-1] + 1
        if draft.parents == list(range(-1, len(draft.parents) - 1)):
            return PackRow(draft.tokens[-1:], length + len(draft.tokens) - 1, pages, 1)
        tokens = [draft.row.tokens[-1], *draft.tokens[: draft.forwarded]]
        return PackRow(tokens, length - 1, pages, len(draft.front), np.asarray(draft.parents[: draft.forwarded], dtype=np.int32))

    def _grow(self, going: Sequence[_Draft], logits: Tensor, level: int, width: int) -> None:
        """Draws the children of all fronts, and makes them the fronts. Logits that allow no token give no child."""
        logits = logits[:, : self._context.vocab_size]
        owners = [(draft, node) for draft in going for node in draft.front]
        rows = [draft.row for draft, _ in owners]
        positions = [len(row.tokens) + level for row in rows]
        drawn = self._context.sample.draw(logits, rows, positions, [node for _, node in owners], width)
        chances = _probabilities(logits, drawn, [row.params.temperature for row in rows])
        for draft in going:
            draft.front = []
        for (draft, node), children, own in zip(owners, drawn, chances, strict=True):
            for (token, q), chance in zip(children[: draft.room], own, strict=False):
                if not 0 <= chance <= 1:
                    continue
                draft.front.append(len(draft.tokens))
                draft.tokens.append(token)
                draft.parents.append(node)
                draft.confidence.append(chance)
                if q is not None:
                    draft.q.append(_padded(q, self._context.vocab_size))


def _padded(q: Tensor, vocab_size: int) -> Tensor:
    """float32 [vocab_size]: a smaller draft vocabulary gives the other ids no chance."""
    return q if len(q) == vocab_size else torch.nn.functional.pad(q, (0, vocab_size - len(q)))


def _probabilities(
    logits: Tensor, drawn: Sequence[Sequence[tuple[int, Tensor | None]]], temperatures: Sequence[float]
) -> list[list[float]]:
    """The draft model's probability of each token drawn: at its temperature, or 1 for a greedy request.

    Args:
        logits: float32 [R, vocabulary].
        drawn: tokens per row.
        temperatures: R temperatures.
    """
    scale = torch.tensor([t if t > 0 else 1.0 for t in temperatures], dtype=torch.float32)
    totals = log_sum_exp(logits, scale).tolist()
    width = max((len(tokens) for tokens in drawn), default=0)
    ids = torch.tensor([[token for token, _ in tokens] + [0] * (width - len(tokens)) for tokens in drawn], device=logits.device)
    chosen = logits.gather(1, ids.long()).tolist()
    return [  # NaN stays NaN
        [min(math.exp(logit / t - total), 1.0) for logit in own] for own, t, total in zip(chosen, scale.tolist(), totals, strict=True)
    ]
