"""The verifier seam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec.plan import Accepted, BatchPlan
from specdec.tree import DraftTree


class Verifier(Protocol):
    """Decides which drafted nodes stand, and what follows them."""

    def accept(self, plan: BatchPlan, trees: Sequence[DraftTree], logits: Tensor) -> Accepted:
        """
        Args:
            plan: the rows of this step.
            trees: one per row; empty where nothing was drafted.
            logits: float32 [R, vocabulary]: for each emitting row its last pending token, then its nodes. Read only.

        Returns:
            The accepted paths and next tokens. A row whose logits hold no finite value has an entry in `errors`.
        """
        ...
