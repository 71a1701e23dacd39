"""Books a step's seconds and tokens to the requests that took part."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.plan import BatchPlan, RowOutcome, StepCost
from specdec.tree import DraftTree


def account(plan: BatchPlan, trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome], cost: StepCost) -> None:
    """Adds this step to the stats of its requests.

    Forward seconds are shared by token rows forwarded, draft seconds by nodes among the rows of a drafter (equally where
    it proposed none), the rest equally. The shares add up to the step.
    """
    tokens = [row.pending + len(tree) for row, tree in zip(plan.rows, trees, strict=True)]
    total = sum(tokens)
    drafting = _draft_shares(plan, trees)
    for index, (row, tree, outcome) in enumerate(zip(plan.rows, trees, outcomes, strict=True)):
        stats = row.request.stats
        share = cost.verify_s * tokens[index] / total
        if row.decodes:
            stats.verify_s += share
            stats.verifies += 1
            stats.drafted += len(tree)
            stats.accepted += len(outcome.path)
            stats.emitted += len(outcome.emitted)
        else:
            stats.prefill_s += share
            stats.prefill_tokens += row.pending
        stats.draft_s += cost.draft_s.get(row.drafter, 0.0) * drafting[index]
        stats.sample_s += cost.sample_s / len(plan.rows)
        stats.commit_s += cost.commit_s / len(plan.rows)
        stats.host_s += cost.host_s / len(plan.rows)


def _draft_shares(plan: BatchPlan, trees: Sequence[DraftTree]) -> list[float]:
    nodes: dict[str, int] = {}
    rows: dict[str, int] = {}
    for row, tree in zip(plan.rows, trees, strict=True):
        if row.draft_limit:
            nodes[row.drafter] = nodes.get(row.drafter, 0) + len(tree)
            rows[row.drafter] = rows.get(row.drafter, 0) + 1
    return [
        0.0 if not row.draft_limit else len(tree) / nodes[row.drafter] if nodes[row.drafter] else 1 / rows[row.drafter]
        for row, tree in zip(plan.rows, trees, strict=True)
    ]
