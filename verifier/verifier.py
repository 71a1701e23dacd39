"""The verifier of a step: logits through transforms, rules and walk, to accepted paths and next tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.plan import Accepted, BatchPlan
from specdec.request import Request
from specdec.tree import DraftShape, DraftTree
from specdec.verifier.base import Decision, RowNodes, Rule, StepLogits, Transform
from specdec.verifier.logprobs import emitted_logprobs, prompt_logprobs, wanted_rows

NO_TOKEN = (
    "the model's logits hold NaN or no finite value, so no token can be chosen; if its files are whole, have them converted again: "
    "`specdec cache clear converted`"
)
ALL_BANNED = "the request's parameters or its constraint leave no token that can be chosen"
_NOTHING = Decision((), -1)


class Verifier:
    """Decides which drafted nodes stand, and what follows them.

    Args:
        rules: rule name -> rule.
        default: name of the rule of requests that name none.
        transforms: applied in this order before any rule.
    """

    def __init__(self, rules: Mapping[str, Rule], default: str, transforms: Sequence[Transform] = ()) -> None:
        self._rules = rules
        self._default = default
        self._transforms = tuple(transforms)

    def accept(self, plan: BatchPlan, trees: Sequence[DraftTree], logits: Tensor) -> Accepted:
        """
        Args:
            plan: the rows of this step.
            trees: one per row; empty where nothing was drafted.
            logits: float32 [R, vocabulary]: of each row's last `row.num_logits` tokens; the root and the nodes come last.

        Returns:
            The accepted paths and next tokens. A row for which no token can be chosen has an entry in `errors`.
        """
        scored = prompt_logprobs(plan, trees, logits)
        rows = emitting_rows(plan, trees)
        step = StepLogits(logits, keep=wanted_rows(rows))
        for transform in self._transforms:
            transform.apply(rows, step)
        decisions: dict[int, Decision] = {}
        sound = [row for row in rows if row.index not in step.errors]
        for name in dict.fromkeys(self._rule_of(row.request) for row in sound):
            own = [row for row in sound if self._rule_of(row.request) == name]
            for row, decision in zip(own, self._rules[name].decide(own, step.current), strict=True):
                decisions[row.index] = _settled(decision, row.tree)
        errors = {row.index: _reason(row, logits) for row in sound if decisions[row.index].token < 0}
        settled = [decisions.get(index, _NOTHING) for index in range(len(plan.rows))]
        return Accepted(
            [decision.path for decision in settled],
            [decision.token for decision in settled],
            errors={**step.errors, **errors},
            logprobs=emitted_logprobs(sound, decisions, step),
            prompt_logprobs=scored,
        )

    def reads_q(self, request: Request) -> bool:
        """Whether drafts of a request should say what they were drawn from. Greedy requests draw nothing."""
        return self._rules[self._rule_of(request)].reads_q and not request.params.greedy

    def shapes(self, plan: BatchPlan, trees: Sequence[DraftTree]) -> list[DraftShape]:
        """What may decide how much of each row's draft is verified: no tokens, and under a blind rule no confidences."""
        return [
            tree.shape(blind=self._rules[self._rule_of(row.request)].blind and not row.request.params.greedy)
            for row, tree in zip(plan.rows, trees, strict=True)
        ]

    def status(self) -> dict[str, Any]:
        """JSON values: the default rule, and per rule how many proposals were no distribution."""
        bad_q = {name: rule.bad_q for name, rule in self._rules.items() if rule.reads_q}
        return {"rule": self._default, "bad_q": bad_q}

    def _rule_of(self, request: Request) -> str:
        return request.params.verify_rule or self._default


def emitting_rows(plan: BatchPlan, trees: Sequence[DraftTree]) -> list[RowNodes]:
    """The rows that choose tokens in this step, and where their logits lie."""
    rows: list[RowNodes] = []
    start = 0
    for index, (row, tree) in enumerate(zip(plan.rows, trees, strict=True)):
        start += row.num_logits(len(tree))
        if row.emits:
            rows.append(RowNodes(index, row.request, tree, start - len(tree) - 1, row.length))
    return rows


def _settled(decision: Decision, tree: DraftTree) -> Decision:
    """Where no token can be chosen after an accepted node, that node's token is the last one of the step.

    The next step then begins at the node, and fails there: one step later, and as a run without drafts does.
    """
    if decision.token >= 0 or not decision.path:
        return decision
    return Decision(decision.path[:-1], int(tree.tokens[decision.path[-1]]))


def _reason(row: RowNodes, logits: Tensor) -> str:
    """Why no token can be chosen at the root: bans leave -inf behind, all else is the model's."""
    return ALL_BANNED if bool((logits[row.start] == -torch.inf).all()) else NO_TOKEN
