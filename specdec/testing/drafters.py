"""Scripted drafters: right, wrong, or right just so often, so that a test knows what must come of it.

They follow a reference, the ids that a run without drafts gives, and propose nothing once a request has left it. Give
one to an engine like any drafter: `LLM(model, drafter=Oracle({prompt: ids}))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specdec.drafters.base import Drafter, DrafterContext, DraftRow
from specdec.errors import DrafterError
from specdec.plan import DraftNeeds
from specdec.request import SamplingParams
from specdec.tree import EMPTY, DraftTree

References = Mapping[tuple[int, ...], Sequence[int]] | Callable[[DraftRow], Sequence[int]]
"""Prompt -> output ids, or a function of the row where the prompt alone does not tell (sampled requests)."""


class Scripted(Drafter):
    """Base of those that follow a reference.

    Args:
        references: the outputs; a request whose prompt is not among them is not drafted.
        limit: nodes per step.
    """

    def __init__(self, references: References, limit: int = 8) -> None:
        self.default_limit = limit
        self._references = references

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        trees = []
        for row in rows:
            upcoming = self.upcoming(row)[: min(row.limit, row.depth)]
            trees.append(DraftTree.chain(self.script(row, upcoming)) if upcoming else EMPTY)
        return trees

    def script(self, row: DraftRow, upcoming: list[int]) -> list[int]:
        """The chain to propose, given the ids that will really come."""
        return upcoming

    def upcoming(self, row: DraftRow) -> list[int]:
        """What the reference says will come; empty at its end, and where the request does not follow it."""
        if callable(self._references):
            reference = list(self._references(row))
        else:
            reference = list(self._references.get(tuple(row.tokens[: row.num_prompt]), ()))
        output = row.tokens[row.num_prompt :]
        return reference[len(output) :] if reference[: len(output)] == list(output) else []


class Oracle(Scripted):
    """ORACLE: always right."""


class Alt(Scripted):
    """ALT(i): the first `right` ids of every draft are right, the rest is wrong.

    Args:
        references: as in Scripted.
        right: how many.
        vocab_size: a wrong id is the right one + 1, modulo this.
        limit: nodes per step.
    """

    def __init__(self, references: References, right: int, vocab_size: int, limit: int = 8) -> None:
        super().__init__(references, limit)
        self._right = right
        self._vocab_size = vocab_size

    def script(self, row: DraftRow, upcoming: list[int]) -> list[int]:
        return self.partly_right(upcoming, self._right)

    def partly_right(self, upcoming: list[int], right: int) -> list[int]:
        return upcoming[:right] + [(token + 1) % self._vocab_size for token in upcoming[right:]]


class Anti(Alt):
    """ANTI: always wrong."""

    def __init__(self, references: References, vocab_size: int, limit: int = 8) -> None:
        super().__init__(references, 0, vocab_size, limit)


class Script(Alt):
    """SCRIPT([a1, a2, ...]): a_s ids are right at the request's step s, the rest is wrong; past the list all is wrong."""

    def __init__(self, references: References, rights: Sequence[int], vocab_size: int, limit: int = 8) -> None:
        super().__init__(references, 0, vocab_size, limit)
        self._rights = list(rights)
        self._steps: dict[str, int] = {}

    def script(self, row: DraftRow, upcoming: list[int]) -> list[int]:
        step = self._steps.get(row.request_id, 0)
        self._steps[row.request_id] = step + 1
        return self.partly_right(upcoming, self._rights[step] if step < len(self._rights) else 0)

    def forget(self, request_id: str) -> None:
        self._steps.pop(request_id, None)


class Empty(Drafter):
    """EMPTY: never proposes anything."""

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        return [EMPTY] * len(rows)


class OneHot(Drafter):
    """ONEHOT(d): always proposes the same id."""

    def __init__(self, token: int, limit: int = 1) -> None:
        self.default_limit = limit
        self._token = token

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        return [DraftTree.chain([self._token] * min(row.limit, row.depth)) for row in rows]


class RandomTree(Drafter):
    """Random ids on a random tree, with random confidences; the same for the same request and length.

    Args:
        vocab_size: ids lie below it.
        limit: nodes per step.
        seed: another one gives other trees.
    """

    def __init__(self, vocab_size: int, limit: int = 8, seed: int = 0) -> None:
        self.default_limit = limit
        self._vocab_size = vocab_size
        self._seed = seed

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        return [self._tree(row) for row in rows]

    def _tree(self, row: DraftRow) -> DraftTree:
        random = np.random.default_rng([self._seed, row.seed % 2**63, len(row.tokens), *map(int, row.tokens[-2:])])
        tokens = random.integers(0, self._vocab_size, size=row.limit, dtype=np.int32)
        parents = np.array([random.integers(-1, node) if node else -1 for node in range(row.limit)], dtype=np.int32)
        return DraftTree(tokens, parents, random.random(row.limit, dtype=np.float32)).limited(row.limit, row.depth)


class Table(Drafter):
    """TABLE(q): draws every node from the one distribution `q`, and says so.

    Args:
        context: gives the noise and the vocabulary.
        q: probabilities of ids 0, 1, ...; the rest has none.
        limit: levels per step.
        width: children per level, drawn without replacement; the next level hangs off the first.
        independent: draw with noise of its own; else with the request's, as the target will.
    """

    needs = DraftNeeds(q=True)

    def __init__(self, context: DrafterContext, q: Sequence[float], limit: int = 1, width: int = 1, independent: bool = False) -> None:
        self.default_limit = limit * width
        self._context = context
        self._width = width
        self._independent = independent
        self._q = torch.zeros(context.vocab_size)
        self._q[: len(q)] = torch.tensor(list(q), dtype=torch.float32)
        if not 1 <= width <= int((self._q > 0).sum()):
            raise DrafterError(f"TABLE: width must be between 1 and the {int((self._q > 0).sum())} ids that q allows, got {width}")

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        drawn: list[list[tuple[int, int, Tensor]]] = [[] for _ in rows]  # per row: token, parent, the q it was drawn from
        parents = [-1] * len(rows)
        for level in range(max((self._levels(row) for row in rows), default=0)):
            live = [index for index, row in enumerate(rows) if level < self._levels(row)]
            q = self._q.repeat(len(live), 1)
            for place in range(self._width):
                tokens = self._draw(q, [rows[index] for index in live], level, [parents[index] for index in live], place)
                for place, (index, token) in enumerate(zip(live, tokens, strict=True)):
                    drawn[index].append((token, parents[index], q[place]))
                q = q.clone()
                q[torch.arange(len(live)), torch.tensor(tokens)] = 0
                q /= q.sum(1, keepdim=True).clamp(min=1e-30)
            for index in live:
                parents[index] = len(drawn[index]) - self._width
        return [_tree_of(nodes) for nodes in drawn]

    def _levels(self, row: DraftRow) -> int:
        return min(row.limit // self._width, row.depth)

    def _draw(self, q: Tensor, rows: Sequence[DraftRow], level: int, nodes: Sequence[int], place: int) -> list[int]:
        positions = [len(row.tokens) + level for row in rows]
        if not self._independent:
            # filters and temperature are the target's business: q is what it is
            plain = [replace(row, params=SamplingParams(temperature=1.0)) for row in rows]
            own = self._context.sample.named(f"table {place}")
            return [children[0][0] for children in own.draw(q.log(), plain, positions, nodes)]
        tokens = []
        for chances, row, position in zip(q.double().numpy(), rows, positions, strict=True):
            random = np.random.default_rng([row.seed % 2**63, position, int((chances > 0).sum())])
            tokens.append(int(random.choice(len(chances), p=chances / chances.sum())))
        return tokens


def _tree_of(nodes: Sequence[tuple[int, int, Tensor]]) -> DraftTree:
    if not nodes:
        return EMPTY
    tokens, parents, distributions = zip(*nodes, strict=True)
    return DraftTree(np.asarray(tokens, dtype=np.int32), np.asarray(parents, dtype=np.int32), q=torch.stack(distributions))


def table(q: Sequence[float], limit: int = 1, width: int = 1, independent: bool = False) -> Callable[[DrafterContext], Table]:
    """TABLE(q) as a drafter for an engine, which supplies the context."""

    def build(context: DrafterContext) -> Table:
        return Table(context, q, limit, width, independent)

    return build


def self_drafter(depth: int = 4) -> Callable[[DrafterContext], Drafter]:
    """SELF: the target drafts for itself, sharing its weights, with KV of its own."""

    def build(context: DrafterContext) -> Drafter:
        from specdec.drafters.draft_model import DraftModelDrafter

        if context.target is None:
            raise DrafterError("SELF needs the target, and this context has none: run it in an engine")
        return DraftModelDrafter(context, context.target, depth, name="self")

    return build
