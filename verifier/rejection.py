"""Recursive rejection sampling: children are tried in order, each against what the rejected ones left of the target.

The papers are named in `specdec.verifier.reference.rejection`, which this does fast.
"""

from __future__ import annotations

from specdec.verifier.weighing import End, WeighedDraft, WeighingRule


class RejectionRule(WeighingRule):
    """Implements `specdec.verifier.base.Rule`."""

    def verify(self, draft: WeighedDraft) -> End:
        node = -1
        path: list[int] = []
        while True:
            current, scale = draft.target(node), 1.0  # the distribution is `current * scale`
            if current is None:
                return End(tuple(path), None)
            for child in draft.children.get(node, ()):
                token, q = draft.tokens[child], draft.proposal(child)
                if draft.accepts(child, float(current[token]) * scale, 1.0 if q is None else float(q[token])):
                    break
                if q is None:
                    current[token] = 0
                else:
                    current.mul_(scale).sub_(q).clamp_(min=0)
                left = float(current.sum())
                if left > 0:
                    scale = 1.0 / left
                else:
                    current, scale = draft.certain(node), 1.0
            else:
                return End(tuple(path), current)
            node = child
            path.append(node)
