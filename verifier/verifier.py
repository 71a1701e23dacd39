"""The verifier of a step: logits through transforms, rules and walk, to accepted paths and next tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from specdec.plan import Accepted, BatchPlan
from specdec.tree import DraftTree
from specdec.verifier.base import Decision, RowNodes, Rule, StepLogits, Transform

NO_TOKEN = "the model's logits hold NaN or no finite value, so no token can be chosen"


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
            The accepted paths and next tokens. A row whose logits hold no finite value has an entry in `errors`.
        """
        rows = emitting_rows(plan, trees)
        step = StepLogits(logits)
        for transform in self._transforms:
            transform.apply(rows, step)
        decisions: dict[int, Decision] = {}
        for name in dict.fromkeys(self._rule_of(row) for row in rows):
            own = [row for row in rows if self._rule_of(row) == name]
            decisions.update(zip((row.index for row in own), self._rules[name].decide(own, step.current), strict=True))
        return _accepted(len(plan.rows), decisions)

    def _rule_of(self, row: RowNodes) -> str:
        return row.request.params.verify_rule or self._default


def emitting_rows(plan: BatchPlan, trees: Sequence[DraftTree]) -> list[RowNodes]:
    """The rows that choose tokens in this step, and where their logits lie."""
    rows: list[RowNodes] = []
    start = 0
    for index, (row, tree) in enumerate(zip(plan.rows, trees, strict=True)):
        start += row.num_logits(len(tree))
        if row.emits:
            rows.append(RowNodes(index, row.request, tree, start - len(tree) - 1, row.length))
    return rows


def _accepted(num_rows: int, decisions: Mapping[int, Decision]) -> Accepted:
    counts = np.zeros(num_rows, dtype=np.int32)
    next_tokens = np.full(num_rows, -1, dtype=np.int32)
    for index, decision in decisions.items():
        counts[index], next_tokens[index] = len(decision.path), decision.token
    nodes = np.full((num_rows, counts.max(initial=0)), -1, dtype=np.int32)
    for index, decision in decisions.items():
        nodes[index, : counts[index]] = decision.path
    errors = {index: NO_TOKEN for index, decision in decisions.items() if decision.token < 0}
    return Accepted(nodes, counts, next_tokens, errors)
