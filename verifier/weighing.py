"""What the rules that weigh a draft against its q share: lazily computed distributions, and the draw that ends a step.

Only rows that a rule visits are touched. The rules are in `rejection` and `traversal`, their references in `reference`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.backend.base import Backend
from specdec.request import SamplingParams
from specdec.verifier.base import Decision, RowNodes
from specdec.verifier.coins import RESIDUAL, Coins, accept_coins
from specdec.verifier.coupled import CoupledRule
from specdec.verifier.sampling import choice_batch, filters, probabilities


class WeighedDraft:
    """One row's draft, target and coins, each computed when it is asked for.

    Args:
        row: the row.
        logits: float32 [R, vocabulary] of the step, read only.
        coins: source of accept coins.

    Attributes:
        bad_q: proposals met that are no distribution.
    """

    def __init__(self, row: RowNodes, logits: Tensor, coins: Coins) -> None:
        self.children = row.tree.children()
        self.tokens: list[int] = row.tree.tokens.tolist()
        self.bad_q = 0
        self._row = row
        self._logits = logits
        self._proposals: dict[int, Tensor | None] = {}
        self._coins: list[float] = coins(row.request.seed, row.length, len(row.tree)).tolist() if len(row.tree) else []

    def target(self, node: int) -> Tensor | None:
        """float32 [vocabulary], the caller's own: p after a node, -1 for the root; None where no token can be chosen."""
        index = self._row.start + 1 + node
        logits = self._logits[index]
        top = float(logits.max())
        if not math.isfinite(top):
            return None
        params = self._row.request.params
        if not filters(params):
            return torch.softmax((logits - top) / max(params.temperature, 1e-30), dim=-1)
        return probabilities(logits[None], choice_batch([self._row.request], [self._row.length], [1]))[0]

    def proposal(self, node: int) -> Tensor | None:
        """float32 [vocabulary], read only: what a node was drawn from; None where that was its own token for certain.

        A q that is no distribution counts as certain, which is exact whatever the token came from.
        """
        if self._row.tree.q is None:
            return None
        if node not in self._proposals:
            self._proposals[node] = self._read(node, self._row.tree.q[node])
        return self._proposals[node]

    def _read(self, node: int, q: Tensor) -> Tensor | None:
        total, own = float(q.sum()), float(q[self.tokens[node]])
        if not (own > 0 and total < torch.inf and float(q.min()) >= 0):
            self.bad_q += 1
            return None
        return None if own == total else q / total

    def accepts(self, node: int, p: float, q: float) -> bool:
        """Whether the node's coin falls below p / q. Strict, so that p = 0 is never accepted."""
        return self._coins[node] * q < p

    def certain(self, node: int) -> Tensor:
        """float32 [vocabulary]: all on the target's most probable token after a node, for a residual that rounding emptied."""
        target = self.target(node)
        assert target is not None  # it was computed before
        return torch.zeros_like(target).index_fill_(0, target.argmax(), 1.0)


@dataclass(frozen=True)
class End:
    """Where a row's verification ended.

    Attributes:
        path: accepted nodes from the root down.
        weights: float32 [vocabulary], in proportion to which the next token is drawn; None where none can be.
    """

    path: tuple[int, ...]
    weights: Tensor | None


class WeighingRule(ABC):
    """Implements `specdec.verifier.base.Rule`, but for `verify`. Greedy rows are walked as by the coupled rule.

    Args:
        backend: draws the last token.
        coins: source of accept coins.

    Attributes:
        bad_q: proposals met that are no distribution.
    """

    blind = True
    reads_q = True

    def __init__(self, backend: Backend, coins: Coins = accept_coins) -> None:
        self._backend = backend
        self._coins = coins
        self._coupled = CoupledRule(backend)
        self.bad_q = 0

    @abstractmethod
    def verify(self, draft: WeighedDraft) -> End:
        """Decides which nodes stand, and what the next token is drawn from."""

    def decide(self, rows: Sequence[RowNodes], logits: Tensor) -> list[Decision]:
        decided: dict[int, Decision] = {}
        greedy = [row for row in rows if row.request.params.greedy]
        if greedy:
            decided.update(zip((row.index for row in greedy), self._coupled.decide(greedy, logits), strict=True))
        sampled = [row for row in rows if not row.request.params.greedy]
        ends = []
        for row in sampled:
            draft = WeighedDraft(row, logits, self._coins)
            ends.append(self.verify(draft))
            self.bad_q += draft.bad_q
        tokens = self._draw(sampled, ends)
        decided.update((row.index, Decision(end.path, token)) for row, end, token in zip(sampled, ends, tokens, strict=True))
        return [decided[row.index] for row in rows]

    def _draw(self, rows: Sequence[RowNodes], ends: Sequence[End]) -> list[int]:
        """The token after each path, with the request's own noise of the residual stream."""
        places = [index for index, end in enumerate(ends) if end.weights is not None]
        tokens = [-1] * len(rows)
        if not places:
            return tokens
        weights = torch.stack([end.weights for end in ends if end.weights is not None])
        positions = [rows[place].length + len(ends[place].path) for place in places]
        batch = choice_batch([_Drawer(rows[place].request.seed) for place in places], positions)
        salts = torch.tensor([rows[place].length for place in places], dtype=torch.int64)
        drawn: list[int] = self._backend.choose(weights.log(), replace(batch, stream=RESIDUAL, salts=salts)).tolist()
        for place, token in zip(places, drawn, strict=True):
            tokens[place] = token
        return tokens


_PLAIN = SamplingParams(temperature=1.0)


@dataclass(frozen=True)
class _Drawer:
    """A request's seed at temperature 1 and without filters, since the weights have gone through both."""

    seed: int
    params: SamplingParams = _PLAIN
