"""One server of the simulation: the engine's step, with the device and the drafter replaced by their cost and their law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.config import EngineConfig
from specdec.kv_manager.manager import KVManager
from specdec.plan import BatchPlan, Row, RowOutcome, StepCost
from specdec.request import Request
from specdec.scheduler.admission import check_prompt, check_queue
from specdec.scheduler.cost_model import CostModel
from specdec.scheduler.cost_table import GRID, CostTable
from specdec.scheduler.draft_costs import draft_works, fit_draft
from specdec.scheduler.scheduler import Scheduler
from specdec.scheduler.simulator.acceptance_law import Fate
from specdec.scheduler.simulator.costs import DraftCost
from specdec.scheduler.simulator.profile import Profile
from specdec.scheduler.simulator.roofline import Load
from specdec.tree import DraftTree

_WARM_LOGITS, _WARM_KV, _WARM_CATCH_UP = 64, 1024, 2048  # as specdec.warm_up measures
_TOKEN = 0  # every generated token: what it is changes nothing
_CHAINS = [DraftTree.chain([_TOKEN] * length) for length in range(257)]
_SHAPES = [tree.shape() for tree in _CHAINS]
_PATHS = [tuple(range(length)) for length in range(257)]
_EMITTED = [(_TOKEN,) * length for length in range(258)]


@dataclass(eq=False, slots=True)
class Job:
    """A request of the trace on its way.

    Attributes:
        number: its place in the trace.
        num_output: tokens after which it stops; the scheduler does not know.
        first_s, last_s: when its first and its latest tokens came.
        longest_gap_s: the longest wait between two deliveries.
    """

    number: int
    request: Request
    fate: Fate
    num_output: int
    replica: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    longest_gap_s: float = 0.0

    def deliver(self, now_s: float) -> None:
        """Notes that tokens came."""
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.last_s = now_s


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, for the course of the run.

    Attributes:
        end_s: when it ended.
        decode_rows, drafted, accepted, emitted, prefill_tokens: counts, as in docs/architecture.md.
        running, waiting: requests after the step.
        kv_used: pages that are referenced.
        predicted_s: what the scheduler expected the step to take, None where it said nothing.
    """

    end_s: float
    cost: StepCost
    decode_rows: int
    drafted: int
    accepted: int
    emitted: int
    prefill_tokens: int
    running: int
    waiting: int
    kv_used: int
    predicted_s: float | None


class _NoStorage:
    """KV without contents: the pages are counted all the same."""

    def copy_pages(self, src: list[int], dst: list[int]) -> None: ...

    def move_slots(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None: ...

    def copy_out(self, pages: Sequence[int], places: Sequence[int]) -> None: ...

    def copy_in(self, places: Sequence[int], pages: Sequence[int]) -> None: ...


@dataclass
class Noise:
    """Steps that take longer or shorter than the profile says: lognormal with this sigma, the median being 1."""

    sigma: float
    seed: int
    _random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def factor(self) -> float:
        return float(np.exp(self.sigma * self._random.standard_normal())) if self.sigma else 1.0


def _warm_up(profile: Profile, config: EngineConfig, draft: DraftCost | None) -> CostTable:
    """What an engine measures when it starts: forwards of every size on the grid, of one row with more KV to read, and drafts."""
    sizes = [size for size in GRID if size <= config.max_batch_tokens]
    points = {n: profile.forward.seconds(Load(n, n, n * (n + 1) // 2, min(n, _WARM_LOGITS))) for n in sizes}
    behind = profile.forward.seconds(Load(1, 1 + _WARM_KV, 1 + _WARM_KV, 1))
    drafts = {}
    if draft is not None and draft.model is not None:
        most = min(config.max_batch_tokens, _WARM_CATCH_UP)
        measured = {
            work: draft.seconds(work.rows, work.depth, work.rows + work.catch_up, work.rows) for work in draft_works(draft.limit, most)
        }
        drafts[config.drafter] = fit_draft(measured)
    return CostTable.measured(points, max(0.0, behind - points[1]) / _WARM_KV, drafts=drafts, deepest=draft.limit if draft else 0)


class Replica:
    """A scheduler and a KV pool with a clock of their own.

    Args:
        index: which of the replicas.
        config: the engine's options; `num_pages` is the profile's pool where it is None.
        profile: what forwards cost.
        draft: what drafting costs; None where nothing drafts.
        draft_limit: nodes per request and step that the drafter may propose.
        noise: of the step times.
    """

    def __init__(
        self, index: int, config: EngineConfig, profile: Profile, draft: DraftCost | None, draft_limit: Callable[[str], int], noise: Noise
    ) -> None:
        self.index = index
        self.config = config
        self.now_s = 0.0
        self.steps: list[StepRecord] = []
        self.kv = KVManager(config.num_pages or profile.kv_tokens // config.page_size, config.page_size, prefix_cache=config.prefix_cache)
        self.max_length = min(config.max_model_len or self.kv.num_pages * config.page_size, self.kv.num_pages * config.page_size)
        costs = CostModel(_warm_up(profile, config, draft)) if config.warm_up_s > 0 else None
        self.scheduler = Scheduler(config, self.kv, draft_limit, lambda _: None, lambda: self.now_s, costs, self._catch_up)
        self._profile = profile
        self._draft = draft
        self._noise = noise
        self._jobs: dict[str, Job] = {}
        self._storage = config.drafter if draft is not None and draft.model is not None else None
        if self._storage is not None:
            self.kv.register(self._storage, _NoStorage())

    @property
    def num_requests(self) -> int:
        """Requests that wait or run here."""
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Queues a request.

        Raises:
            RequestError: it is refused, as the engine would refuse it.
        """
        check_prompt(job.request.num_prompt, self.max_length)
        check_queue(len(self.scheduler.waiting), 1, self.config.max_queue)
        self.scheduler.check(job.request)
        self.now_s = max(self.now_s, job.request.arrival_s) if not self._jobs else self.now_s
        self.scheduler.add(job.request)
        self._jobs[job.request.id] = job
        job.replica = self.index

    def step(self) -> list[Job]:
        """Advances the clock by one step of the engine. Returns the requests that ended."""
        plan = self.scheduler.plan()
        self.kv.reserve(plan)
        drafted_s = self._draft_seconds(plan)
        lengths = [min(row.draft_limit, row.depth_limit) for row in plan.rows]
        plan, kept = self.scheduler.trim(plan, [_SHAPES[length] for length in lengths])
        lengths = [int(np.count_nonzero(keep)) for keep in kept]
        trees = [_CHAINS[length] for length in lengths]
        outcomes = [self._outcome(row, length) for row, length in zip(plan.rows, lengths, strict=True)]
        self.kv.commit(plan, outcomes)
        cost = self._cost(plan, lengths, drafted_s)
        self.now_s += cost.total_s
        self.scheduler.finish(plan, trees, outcomes, cost)
        self._record(plan, lengths, outcomes, cost)
        return self._deliver(plan, outcomes)

    def _catch_up(self, _drafter: str, request: Request) -> int | None:
        return None if self._storage is None else len(request.tokens) - self.kv.cached(request.id, self._storage)

    def _draft_seconds(self, plan: BatchPlan) -> dict[str, float]:
        """Seconds of proposing, and the drafter's own KV brought up to the committed tokens."""
        rows = depth = catch_up = kv_tokens = 0
        for row in plan.rows:
            if row.draft_limit:
                rows += 1
                depth = max(depth, min(row.draft_limit, row.depth_limit))
                if self._storage is not None:
                    catch_up += row.length - self.kv.cached(row.request.id, self._storage)
                    kv_tokens += row.length
                    self.kv.set_cached(row.request.id, self._storage, row.length)
        if not rows or self._draft is None:
            return {}
        return {self.config.drafter: self._draft.seconds(rows, depth, catch_up, kv_tokens)}

    def _outcome(self, row: Row, drafted: int) -> RowOutcome:
        """What the row emits, appended to its request: the accepted nodes, then one token unless the output has ended."""
        if not row.emits:
            return _NOTHING
        request = row.request
        job = self._jobs[request.id]
        position = request.num_output
        accepted = job.fate.accepted(position, drafted) if drafted else 0
        emitted = _EMITTED[min(accepted + 1, job.num_output - position)]
        request.tokens.extend(emitted)
        ended = "stop" if request.num_output == job.num_output else "length" if request.remaining <= 0 else None
        return RowOutcome(emitted, _PATHS[accepted], ended)

    def _cost(self, plan: BatchPlan, lengths: Sequence[int], drafted_s: dict[str, float]) -> StepCost:
        tokens = kv_tokens = pairs = logits = 0
        for row, nodes in zip(plan.rows, lengths, strict=True):
            new, context = row.pending + nodes, row.cached + row.pending
            tokens += new
            kv_tokens += context
            pairs += new * row.cached + row.pending * (row.pending + 1) // 2 + nodes * row.pending + nodes * (nodes + 1) // 2
            logits += row.num_logits(nodes)
        host, rows, factor = self._profile.host, len(plan.rows), self._noise.factor()
        return StepCost(
            draft_s={name: seconds * factor for name, seconds in drafted_s.items()},
            verify_s=self._profile.forward.seconds(Load(tokens, kv_tokens, pairs, logits)) * factor,
            sample_s=(host.sample_s + logits * host.sample_row_s) * factor,
            commit_s=rows * host.commit_row_s * factor,
            host_s=(host.step_s + rows * host.row_s) * factor,
        )

    def _deliver(self, plan: BatchPlan, outcomes: Sequence[RowOutcome]) -> list[Job]:
        ended = []
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            if outcome.emitted:
                job = self._jobs[row.request.id]
                job.deliver(self.now_s)
                if outcome.finish_reason is not None:
                    self.kv.release(row.request)
                    del self._jobs[row.request.id]
                    ended.append(job)
        return ended

    def _record(self, plan: BatchPlan, lengths: Sequence[int], outcomes: Sequence[RowOutcome], cost: StepCost) -> None:
        decodes = [row.decodes for row in plan.rows]
        self.steps.append(
            StepRecord(
                end_s=self.now_s,
                cost=cost,
                decode_rows=sum(decodes),
                drafted=sum(lengths),
                accepted=sum(len(outcome.path) for outcome in outcomes),
                emitted=sum(len(outcome.emitted) for outcome in outcomes),
                prefill_tokens=sum(row.pending for row, decode in zip(plan.rows, decodes, strict=True) if not decode),
                running=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting),
                kv_used=self.kv.num_pages - self.kv.num_available,
                predicted_s=None if plan.predicted is None else plan.predicted.total_s,
            )
        )


_NOTHING = RowOutcome()
