"""The drafter seam. A drafter proposes; it can cost time, and nothing else.

Write one in ten lines: a function `(tokens, limit) -> list[int]`, or a subclass of `Drafter`. See docs/drafters.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.backend.base import Backend
from specdec.config import EngineConfig
from specdec.plan import DraftNeeds
from specdec.request import SamplingParams
from specdec.tree import DraftTree

if TYPE_CHECKING:
    from specdec.models import LoadedModel


@dataclass(frozen=True)
class DraftRow:
    """One request that wants a draft in this step.

    Attributes:
        request_id: unique within the engine.
        tokens: all committed tokens, prompt first. Read only; it grows between steps and never shrinks.
        num_prompt: how many of them are prompt.
        limit: the most nodes, at least 1.
        depth: the deepest node that could still be emitted, at least 1.
        params: the request's sampling parameters.
        seed: the request's 64-bit seed.
        prediction: predicted output ids, empty where the user gave none.
        wants_q: the row's verification rule reads `DraftTree.q`: draw with `context.sample.draw` and return the q it gives,
            with a tree whose shape does not depend on what was drawn; or leave q out.
    """

    request_id: str
    tokens: Sequence[int]
    num_prompt: int
    limit: int
    depth: int
    params: SamplingParams
    seed: int
    prediction: tuple[int, ...] = ()
    wants_q: bool = False


@dataclass(frozen=True)
class DraftOutcome:
    """What became of one row of the last step.

    Attributes:
        request_id: unique within the engine.
        tree: what was verified; it may be less than what was proposed, and is empty where nothing was.
        path: accepted node indices, from the root down.
        emitted: ids appended to the request: the accepted path's, then the correction or bonus token, cut at a stop.
        hidden: layer -> [pending + nodes, hidden], the target's states of this row, for layers in `needs`.
    """

    request_id: str
    tree: DraftTree
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    hidden: dict[int, Tensor]


class DraftKV(Protocol):
    """A drafter's own KV under the requests' block tables (kv_manager.storage implements it)."""

    keys: Tensor
    values: Tensor

    def pages(self, request_id: str) -> NDArray[np.int32]:
        """int32 [p], the request's block table; it covers the committed tokens and this step's draft."""
        ...

    def cached(self, request_id: str) -> int:
        """Leading committed tokens whose KV this drafter has in the pool."""
        ...

    def set_cached(self, request_id: str, count: int) -> None:
        """States how many leading committed tokens now have this drafter's KV."""
        ...


class Sample(Protocol):
    """Chooses tokens with the requests' own noise and sampling parameters, as the target will."""

    def __call__(self, logits: Tensor, rows: Sequence[DraftRow], positions: Sequence[int]) -> list[int]:
        """
        Args:
            logits: float32 [R, vocabulary].
            rows: the request of each logit row.
            positions: index in the sequence of the token each row chooses.

        Returns:
            R token ids; -1 where a row's logits allow none.
        """
        ...

    def draw(
        self, logits: Tensor, rows: Sequence[DraftRow], positions: Sequence[int], nodes: Sequence[int], width: int = 1
    ) -> list[list[tuple[int, Tensor | None]]]:
        """Draws children for nodes of draft trees.

        A row that wants q draws with noise that is independent of the target's, and independent at every node; any other
        one takes the first tokens in the race of the very noise with which the target will choose.

        Args:
            logits: float32 [R, vocabulary], the draft's own; read only.
            rows: the request of each logit row.
            positions: index in the sequence of the tokens drawn.
            nodes: the node of the request's tree under which the tokens are drawn, -1 for the root.
            width: children per logit row, without replacement.

        Returns:
            For each logit row up to `width` (token, q) in the order drawn; q float32 [vocabulary] is the distribution that
            token was drawn from, those before it being gone. None where the row does not want it.
        """
        ...

    def named(self, name: str) -> Sample:
        """The same for the drafter of that name: under rules that read q, two drafters must not draw alike."""
        ...


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is built with.

    Attributes:
        config: the engine's configuration.
        backend: where the target runs.
        vocab_size: ids at or above this are not the target's.
        max_model_len: the target's length limit.
        page_size: tokens in a KV page.
        sample: the target's own way to choose, for drafters that sample.
        create_kv: allocates KV for a drafter: (name, layers, kv heads, head size, dtype) -> DraftKV.
        tokenizer_fingerprint: equal for models whose token ids mean the same; None if the target has no tokenizer.
        target: the target itself, for drafters that share its weights.
        forced: (request id, most) -> the tokens that the request's constraint leaves no choice about after its committed ones.
    """

    config: EngineConfig
    backend: Backend
    vocab_size: int
    max_model_len: int
    page_size: int
    sample: Sample
    create_kv: Callable[[str, int, int, int, torch.dtype], DraftKV]
    tokenizer_fingerprint: str | None = None
    target: LoadedModel | None = None
    forced: Callable[[str, int], Sequence[int]] | None = None


class Drafter(ABC):
    """Proposes draft trees. Only `propose` is required.

    Its state must derive from committed tokens alone, so that a request may be preempted, or be drafted by another
    drafter for a while, at any time.
    """

    needs: DraftNeeds = DraftNeeds()
    default_limit: int = 8
    """Nodes per request and step where nobody asks for less."""

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One tree per row, in order; an empty tree where there is nothing to propose."""

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Told after every step what became of the rows that name this drafter, drafted or not."""

    def forget(self, request_id: str) -> None:
        """The request has ended, or was preempted: drop its state."""
