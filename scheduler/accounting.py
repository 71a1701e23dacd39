"""Books a step's seconds and tokens to the requests that took part."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.plan import BatchPlan, RowOutcome, StepCost
from specdec.scheduler.options import parts_of
from specdec.tree import DraftTree


def account(
    plan: BatchPlan,
    trees: Sequence[DraftTree],
    outcomes: Sequence[RowOutcome],
    cost: StepCost,
    *,
    kv_weight: float = 0.0,
    plain: StepCost | None = None,
) -> None:
    """Adds this step to the stats of its requests. The shares add up to the step.

    Forward seconds are shared by token rows and KV read, draft seconds by nodes among the rows of a drafter (equally where it
    proposed none), the rest equally. What decoding takes with and without drafts is told apart otherwise: nodes are charged what they
    add to the step, so that prompt tokens in it are no reason for them to look cheap or dear.

    Args:
        kv_weight: what reading the KV of one token costs, in token rows forwarded.
        plain: what the step would have taken without drafts; shared alike, it tells what a token of a decoding row would have. None
            where nothing was drafted.
    """
    plain = cost if plain is None else plain
    plain_weights = [row.pending + kv_weight * (row.cached + row.pending) for row in plan.rows]
    weights = [weight + len(tree) for weight, tree in zip(plain_weights, trees, strict=True)]
    total, plain_total = sum(weights), sum(plain_weights)
    drafting = _draft_shares(plan, trees, cost)
    even_s = (cost.sample_s + cost.commit_s + cost.host_s) / len(plan.rows)
    plain_even_s = (plain.sample_s + plain.commit_s + plain.host_s) / len(plan.rows)
    sample_s, commit_s, host_s = (seconds / len(plan.rows) for seconds in (cost.sample_s, cost.commit_s, cost.host_s))
    node_s = (cost.verify_s - plain.verify_s + (even_s - plain_even_s) * len(plan.rows)) / max(1, sum([len(tree) for tree in trees]))
    for row, tree, outcome, weight, plain_weight, drafts in zip(plan.rows, trees, outcomes, weights, plain_weights, drafting, strict=True):
        stats = row.request.stats
        share = cost.verify_s * weight / total
        if row.decodes:
            token_off_s = plain.verify_s * plain_weight / plain_total + plain_even_s
            stats.verify_s += share
            stats.verifies += 1
            stats.drafted += len(tree)
            stats.accepted += len(outcome.path)
            stats.emitted += len(outcome.emitted)
            stats.decode_s += token_off_s + node_s * len(tree) + sum(drafts.values())
            stats.off_s += token_off_s * len(outcome.emitted)
        else:
            stats.prefill_s += share
            stats.prefill_tokens += row.pending
        for name, seconds in drafts.items():
            stats.draft_s += seconds
            stats.draft_by[name] = stats.draft_by.get(name, 0.0) + seconds
        stats.sample_s += sample_s
        stats.commit_s += commit_s
        stats.host_s += host_s


def _draft_shares(plan: BatchPlan, trees: Sequence[DraftTree], cost: StepCost) -> list[dict[str, float]]:
    """Per row, its seconds of each of its drafters."""
    nodes: dict[str, int] = {}
    rows: dict[str, int] = {}
    for row, tree in zip(plan.rows, trees, strict=True):
        for name in parts_of(row.drafter) if row.draft_limit else ():
            nodes[name] = nodes.get(name, 0) + len(tree)
            rows[name] = rows.get(name, 0) + 1
    shares: list[dict[str, float]] = []
    for row, tree in zip(plan.rows, trees, strict=True):
        names = parts_of(row.drafter) if row.draft_limit else ()
        shares.append({name: cost.draft_s.get(name, 0.0) * (len(tree) / nodes[name] if nodes[name] else 1 / rows[name]) for name in names})
    return shares
