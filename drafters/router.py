"""DrafterRouter: which drafter serves which row. The engine asks it and nobody else; no drafter can break a step.

A spec `a+b` is served by two lanes whose trees are merged; lanes are shared by all requests that name the same part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from specdec.drafter_spec import DrafterSpec, parse_drafter_spec
from specdec.drafters.base import DrafterContext, DraftKV, DraftOutcome, DraftRow
from specdec.drafters.lane import Lane
from specdec.drafters.merge import merge_trees, shared_nodes
from specdec.drafters.registry import LIGHT, check_part, create_drafter, is_registered
from specdec.drafters.view import TokenView
from specdec.errors import ConfigError, DrafterError, RequestError
from specdec.plan import BatchPlan, DraftNeeds, Row, RowOutcome
from specdec.request import Request
from specdec.tree import EMPTY, DraftTree

log = logging.getLogger(__name__)

MAX_ON_DEMAND = 32
"""Drafters that requests asked for beyond the configured one; past this, those without a request are dropped."""
_MAX_SPECS = 256  # spellings of specs remembered


class DrafterRouter:
    """Proposes for the rows of a plan with the drafter that each names.

    Args:
        context: what drafters are built with.
        default: the configured spec; its drafters are built now and kept.
        wants_q: whether the verification rule of a request reads `DraftTree.q`.

    Attributes:
        draft_s: seconds of the last step by drafter, `observe` included.

    Raises:
        ConfigError: the spec or an option is wrong.
        DrafterError: a drafter cannot be built.
    """

    def __init__(self, context: DrafterContext, default: str, wants_q: Callable[[Request], bool] = lambda _request: False) -> None:
        self._context = context
        self._wants_q = wants_q
        self._lanes: dict[str, Lane] = {}
        self._kv: dict[str, list[DraftKV]] = {}  # lane -> what it keeps
        self._specs: dict[str, tuple[Lane, ...]] = {}
        self._proposed: dict[tuple[str, str], DraftTree] = {}  # (lane, request) -> its own part of a merged tree
        self.draft_s: dict[str, float] = {}
        parts = parse_drafter_spec(default)
        for part in parts:
            check_part(part)
        self._default = frozenset(str(part) for part in parts)
        self._lanes_of(default)

    @property
    def needs(self) -> DraftNeeds:
        """The union of what the live drafters need."""
        all_needs = [lane.needs for lane in self._lanes.values()]
        layers = sorted({layer for needs in all_needs for layer in needs.hidden_layers})
        return DraftNeeds(tuple(layers), any(needs.q for needs in all_needs), any(needs.kv for needs in all_needs))

    @property
    def errors(self) -> dict[str, dict[str, int]]:
        """Counted errors: drafter -> kind -> count."""
        return {name: dict(lane.errors) for name, lane in self._lanes.items()}

    def status(self) -> list[dict[str, Any]]:
        """For each live drafter its name, state, limit, drafted, accepted, errors and last error, as JSON values."""
        return [lane.status() for lane in self._lanes.values()]

    def default_limit(self, spec: str) -> int:
        """Nodes per step that a row with this spec drafts where nobody asks for less; 0 where nothing would be."""
        return sum(lane.default_limit for lane in self._serving(spec) if not lane.failed)

    def check(self, spec: str) -> None:
        """Builds what a request's spec names, if a request may name it.

        Raises:
            RequestError: the spec is wrong, or names a drafter that has to be configured.
        """
        try:
            for part in parse_drafter_spec(spec):
                if not self._is_allowed(part):
                    if part.target is None:
                        check_part(part)  # an unknown name is told as such; nothing is imported for it
                    raise ConfigError(
                        f"drafter {part} has to be configured when the engine starts; a request may ask for "
                        f"{', '.join(sorted({'off', *LIGHT, *self._default}))} or a registered one without a target"
                    )
            self._lanes_of(spec)
        except (ConfigError, DrafterError) as error:
            raise RequestError(str(error), param="drafter") from error

    def keeps_kv(self, part: str) -> bool:
        """Whether a live drafter has KV of its own, as models and heads do."""
        return bool(self._kv.get(part))

    def catch_up(self, part: str, request: Request) -> int | None:
        """Committed tokens of a running request that a drafter has not read; None for one that keeps no KV."""
        kept = self._kv.get(part)
        return len(request.tokens) - min([kv.cached(request.id) for kv in kept]) if kept else None

    def propose(self, plan: BatchPlan) -> list[DraftTree]:
        """One tree per row of the plan, empty where the row drafts nothing. Each drafter is called once."""
        self.draft_s = {}
        self._proposed = {}
        served = [self._serving(row.drafter) if _drafts(row) else () for row in plan.rows]
        batches: dict[Lane, dict[int, DraftRow]] = {}
        for index, (row, lanes) in enumerate(zip(plan.rows, served, strict=True)):
            for lane in lanes:
                if not lane.failed:
                    limit = row.draft_limit if len(lanes) == 1 else min(row.draft_limit, lane.default_limit)
                    batches.setdefault(lane, {})[index] = _draft_row(row, limit, self._wants_q(row.request))
        trees = {lane: self._propose_with(lane, batch) for lane, batch in batches.items()}
        return [self._tree_of(row, lanes, trees, index) for index, (row, lanes) in enumerate(zip(plan.rows, served, strict=True))]

    def observe(
        self,
        plan: BatchPlan,
        trees: Sequence[DraftTree],
        outcomes: Sequence[RowOutcome],
        hidden: Callable[[int], Mapping[int, Tensor]],
    ) -> None:
        """Tells the drafters what became of their rows, drafted or not.

        Args:
            plan: the step's plan.
            trees: what was verified, per row.
            outcomes: what each row delivered.
            hidden: row index -> {layer: [pending + nodes, hidden]}; asked only for drafters that need states.
        """
        batches: dict[Lane, list[DraftOutcome]] = {}
        for index, (row, tree, outcome) in enumerate(zip(plan.rows, trees, outcomes, strict=True)):
            for lane in self._serving(row.drafter):
                self._book(lane, row, tree, outcome)
                if lane.observes:
                    states = hidden(index) if lane.needs.hidden_layers else {}
                    own = {layer: states[layer] for layer in lane.needs.hidden_layers}
                    batches.setdefault(lane, []).append(DraftOutcome(row.request.id, tree, outcome.path, outcome.emitted, own))
        for lane, batch in batches.items():
            self._timed(lane.name, partial(lane.observe, batch))

    def forget(self, request_id: str) -> None:
        """The request has ended or was preempted."""
        for lane in self._lanes.values():
            lane.forget(request_id)

    def close(self) -> None:
        """Ends the worker threads."""
        for lane in self._lanes.values():
            lane.close()

    def _is_allowed(self, part: DrafterSpec) -> bool:
        return str(part) in self._default or part.name in LIGHT or (part.target is None and is_registered(part.name))

    def _lanes_of(self, spec: str) -> tuple[Lane, ...]:
        """The lanes that serve a spec, built on first use."""
        known = self._specs.get(spec)
        if known is None:
            parts = parse_drafter_spec(spec)
            known = tuple(self._lane(part, keep=frozenset(map(str, parts))) for part in parts)
            if len(self._specs) >= _MAX_SPECS:
                self._specs.clear()
            self._specs[spec] = known
        return known

    def _serving(self, spec: str) -> tuple[Lane, ...]:
        """`_lanes_of` within a step: a drafter that cannot be built, after `check` let it pass, only costs its drafts."""
        try:
            return self._lanes_of(spec)
        except (ConfigError, DrafterError) as error:
            log.warning("drafter %s: %s; requests that name it go on without drafts", spec, error)
            self._specs[spec] = ()
            return ()

    def _lane(self, part: DrafterSpec, keep: frozenset[str]) -> Lane:
        name = str(part)
        if name not in self._lanes:
            kept: list[DraftKV] = []

            def create_kv(*args: Any) -> DraftKV:  # passes on what the context's takes
                kept.append(self._context.create_kv(*args))
                return kept[-1]

            drafter = create_drafter(part, replace(self._context, sample=self._context.sample.named(name), create_kv=create_kv))
            _check_layers(name, drafter.needs, self._context)
            self._drop_idle(keep)
            self._lanes[name] = Lane(name, drafter, self._context.vocab_size, self._context.config.draft_timeout_s)
            self._kv[name] = kept
        return self._lanes[name]

    def _drop_idle(self, keep: frozenset[str]) -> None:
        """Makes room for one more on-demand drafter, oldest first."""
        on_demand = [lane for lane in self._lanes.values() if lane.name not in self._default]
        idle = [lane for lane in on_demand if not lane.requests and lane.name not in keep]
        for lane in idle[: max(0, len(on_demand) - MAX_ON_DEMAND + 1)]:
            lane.close()
            del self._lanes[lane.name]
            self._specs.clear()

    def _propose_with(self, lane: Lane, batch: Mapping[int, DraftRow]) -> dict[int, DraftTree]:
        trees = self._timed(lane.name, partial(lane.propose, list(batch.values())))
        return dict(zip(batch, trees, strict=True))

    def _tree_of(self, row: Row, lanes: Sequence[Lane], trees: Mapping[Lane, Mapping[int, DraftTree]], index: int) -> DraftTree:
        own = {lane.name: trees.get(lane, {}).get(index, EMPTY) for lane in lanes}
        if len(own) < 2:
            return next(iter(own.values()), EMPTY)
        self._proposed.update({(name, row.request.id): tree for name, tree in own.items()})
        return merge_trees(list(own.values()), row.draft_limit)

    def _book(self, lane: Lane, row: Row, tree: DraftTree, outcome: RowOutcome) -> None:
        if len(tree):
            own = self._proposed.get((lane.name, row.request.id)) if self._proposed else None
            lane.count(*((len(tree), len(outcome.path)) if own is None else shared_nodes(tree, own, outcome.path)))

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:  # gives back what `call` does
        start = self._context.backend.clock()
        result = call()
        self.draft_s[name] = self.draft_s.get(name, 0.0) + self._context.backend.clock() - start
        return result


def _check_layers(name: str, needs: object, context: DrafterContext) -> None:
    """Refuses layers that the target does not have: asking for one would fail in the middle of a step."""
    layers = getattr(needs, "hidden_layers", ())
    count = context.target.config.num_layers if context.target is not None else max((x for x in layers if type(x) is int), default=0) + 1
    bad = [layer for layer in layers if type(layer) is not int or not 0 <= layer < count]
    if bad:
        raise DrafterError(f"drafter {name}: hidden_layers must be layer indices from 0 to {count - 1}, got {bad[0]!r}")


def _drafts(row: Row) -> bool:
    return row.draft_limit > 0 and row.depth_limit > 0 and row.emits


def _draft_row(row: Row, limit: int, wants_q: bool) -> DraftRow:
    request = row.request
    return DraftRow(
        request_id=request.id,
        tokens=TokenView(request.tokens),
        num_prompt=request.num_prompt,
        limit=limit,
        depth=row.depth_limit,
        params=request.params,
        seed=request.seed,
        prediction=request.prediction,
        wants_q=wants_q,
    )
