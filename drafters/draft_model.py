"""A smaller model with the same tokenizer as the drafter: `model:PATH`.

It keeps KV of its own under the requests' block tables. As everywhere, it forwards `tokens[cached:]`, then one token
per further node:

    slots    |t0 t1 ... t(c-1)|t(c) ... t(L-1)|d0 d1 ... d(k-2)|          d(k-1) is proposed, and not forwarded
             |<--- cached --->|<-- pending -->|<- speculative ->|

Once the step is decided, the speculative tokens that were accepted are committed ones, whose KV is in place: they join
the cached. The rest is overwritten.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.drafters.base import Drafter, DrafterContext, DraftOutcome, DraftRow
from specdec.drafters.vocabulary import tokenizer_fingerprint
from specdec.errors import ConfigError, DrafterError, SpecdecError
from specdec.pack import PackRow
from specdec.plan import DraftNeeds
from specdec.runner import ModelRunner
from specdec.tree import EMPTY, DraftTree

if TYPE_CHECKING:
    from specdec.models import LoadedModel

MAX_DEPTH = 64
_numbers = itertools.count(1)  # tells the KV of two drafters of one model apart


def check_options(target: str, depth: int = 4) -> None:
    """Raises ConfigError unless 1 <= depth <= 64 and a target that looks like a path exists."""
    if not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(f"drafter 'model': depth must be between 1 and {MAX_DEPTH}, got {depth}")
    path = Path(target).expanduser()
    looks_like_path = target.endswith(".gguf") or target.startswith((os.sep, ".", "~"))
    if looks_like_path and not path.exists():
        raise ConfigError(f"drafter 'model': no such model file or folder: {target}")


def load_draft_model(context: DrafterContext, target: str, depth: int = 4) -> DraftModelDrafter:
    """Loads the model `target` (hub id, folder or `.gguf` file) in the engine's dtype and drafts with it.

    Raises:
        DrafterError: the model cannot be used, or its tokenizer is not the target's.
    """
    from specdec.models import load_model

    check_options(target, depth)
    try:
        loaded = load_model(target, dtype=context.config.dtype, device=context.backend.device)
    except SpecdecError as error:
        raise DrafterError(f"drafter model:{target}: {error}") from error
    return DraftModelDrafter(context, loaded, depth, name=f"model:{target}")


@dataclass
class _Draft:
    """One row while it is being drafted.

    Attributes:
        row: the request's row.
        index: its place among all rows.
        steps: nodes to propose.
        done: committed tokens whose KV is in the pool.
        tokens: nodes so far.
        confidence: the draft model's own probability of each.
    """

    row: DraftRow
    index: int
    steps: int
    done: int
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return len(self.row.tokens) - self.done


class DraftModelDrafter(Drafter):
    """Drafts a chain with a model, choosing as the target will: the request's parameters and its noise.

    Args:
        context: what drafters are built with.
        loaded: the draft model; it may be the target's own.
        depth: nodes per step where nobody asks for less.
        name: for messages and for its KV.

    Raises:
        DrafterError: the draft model's tokenizer is not the target's.
    """

    needs = DraftNeeds(kv=True)

    def __init__(self, context: DrafterContext, loaded: LoadedModel, depth: int = 4, name: str = "model") -> None:
        fingerprint = tokenizer_fingerprint(loaded.tokenizer)
        if fingerprint is not None and context.tokenizer_fingerprint is not None and fingerprint != context.tokenizer_fingerprint:
            raise DrafterError(
                f"drafter {name}: its tokenizer is not the target's, so that its token ids mean other text; "
                f"take a draft model of the target's own family"
            )
        self.default_limit = depth
        self._depth = depth
        self._context = context
        specs = loaded.model.attention_specs
        self._kv = context.create_kv(f"{name}#{next(_numbers)}", len(specs), specs[0].num_kv_heads, specs[0].head_dim, loaded.dtype)
        self._runner = ModelRunner(loaded.model, context.backend, self._kv)
        self._max_length = min(loaded.config.max_position_embeddings, context.max_model_len)
        self._speculative: dict[str, tuple[int, list[int]]] = {}  # request -> committed length then, tokens forwarded after it

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        drafts = [draft for index, row in enumerate(rows) if (draft := self._begin(index, row)) is not None]
        trees = [EMPTY] * len(rows)
        if drafts:
            self._draft(drafts, self._catch_up(drafts))
        for draft in drafts:
            self._speculative[draft.row.request_id] = (len(draft.row.tokens), draft.tokens[:-1])
            if draft.tokens:
                trees[draft.index] = DraftTree.chain(draft.tokens, np.asarray(draft.confidence, dtype=np.float32))
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
        steps = min(self._depth, row.limit, row.depth, self._max_length - length)
        if steps < 1:
            return None
        return _Draft(row, index, steps, min(self._kv.cached(row.request_id), length - 1))

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
            ends = [draft for draft, packed in batch if packed.num_logits]
            logits.update({draft.index: row for draft, row in zip(ends, output, strict=True)})
            for draft, packed in batch:
                draft.done += len(packed.tokens)
                self._kv.set_cached(draft.row.request_id, draft.done)
        return torch.stack([logits[draft.index] for draft in drafts])

    def _draft(self, drafts: Sequence[_Draft], logits: Tensor) -> None:
        """Chooses the nodes one after the other, all rows at once; a row that has its nodes drops out."""
        going = list(drafts)
        while True:
            self._choose(going, logits)
            going = [draft for draft in going if len(draft.tokens) < draft.steps]
            if not going:
                return
            logits = self._runner.forward(
                [
                    PackRow(draft.tokens[-1:], len(draft.row.tokens) + len(draft.tokens) - 1, self._kv.pages(draft.row.request_id), 1)
                    for draft in going
                ]
            ).logits

    def _choose(self, going: Sequence[_Draft], logits: Tensor) -> None:
        """Appends a node to every draft; one whose logits allow no token ends here."""
        logits = logits[:, : self._context.vocab_size]
        positions = [len(draft.row.tokens) + len(draft.tokens) for draft in going]
        tokens = self._context.sample(logits, [draft.row for draft in going], positions)
        chances = _probability(logits, tokens, [draft.row.params.temperature for draft in going])
        for draft, token, chance in zip(going, tokens, chances, strict=True):
            if token < 0 or not 0 <= chance <= 1:
                draft.steps = len(draft.tokens)
                continue
            draft.tokens.append(token)
            draft.confidence.append(chance)


def _probability(logits: Tensor, tokens: Sequence[int], temperatures: Sequence[float]) -> list[float]:
    """The draft model's probability of each token: at its temperature, or 1 for a greedy request.

    Args:
        logits: float32 [R, vocabulary].
        tokens: R ids.
        temperatures: R temperatures.
    """
    scale = torch.tensor([[t if t > 0 else 1.0] for t in temperatures], device=logits.device)
    ids = torch.tensor([[max(token, 0)] for token in tokens], device=logits.device)
    scaled = logits / scale
    log_chance = scaled.gather(1, ids) - scaled.logsumexp(1, keepdim=True)
    chances: list[float] = log_chance.exp().clamp(max=1.0).flatten().tolist()
    return chances
