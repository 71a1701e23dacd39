"""Runs a trace on replicas: an event loop over arrivals and steps, each replica with a clock of its own.

A step happens at its start and takes effect at its end, as in the engine: what arrives in between is planned in the next one.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from specdec.config import EngineConfig
from specdec.errors import ConfigError, RequestError
from specdec.request import Request, SamplingParams
from specdec.scheduler.simulator.acceptance_law import AcceptanceLaw, Category
from specdec.scheduler.simulator.profile import Profile
from specdec.scheduler.simulator.replica import Job, Noise, Replica
from specdec.scheduler.simulator.traces import TraceRequest

OFF = "off"
_PARAMS = SamplingParams(temperature=0.0)
_FIRST_UNIQUE = 2**30  # first tokens of prompts that share nothing; names of prompt blocks are smaller


@dataclass(frozen=True)
class Policy:
    """How much is drafted.

    Attributes:
        name: `off`, `auto`, `all` or `fixed:K`.
        length: K.
    """

    name: str
    length: int | None = None

    @property
    def budget(self) -> str | int:
        """The engine's option `draft_budget`."""
        return self.length or ("all" if self.name == OFF else self.name)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Raises ConfigError for anything else."""
        if text in (OFF, "auto", "all"):
            return cls(text)
        found = re.fullmatch(r"fixed:(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= 256:
            raise ConfigError(f"a policy is off, auto, all, or fixed:K with K from 1 to 256, got {text!r}")
        return cls(text, int(found[1]))


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        trace: requests in order of arrival.
        profile: what steps cost.
        categories: how drafts are accepted.
        policy: how much is drafted.
        config: the engine's options, its targets included; `drafter` names one of the profile's.
        replicas: independent servers; a request goes to the one with the fewest.
        concurrency: so many requests are always under way, arrivals notwithstanding; None keeps the trace's arrivals.
        noise: sigma of the lognormal factor on each step's seconds.
        seed: of acceptance and noise.
    """

    trace: Sequence[TraceRequest]
    profile: Profile
    categories: Sequence[Category]
    policy: Policy
    config: EngineConfig
    replicas: int = 1
    concurrency: int | None = None
    noise: float = 0.0
    seed: int = 0

    @property
    def engine_config(self) -> EngineConfig:
        """The options that the policy comes down to."""
        return replace(self.config, draft_budget=self.policy.budget)


@dataclass
class Run:
    """What came of it.

    Attributes:
        ended: requests in the order in which they ended.
        refused: number in the trace and reason of those that were not taken.
        replicas: the servers, with their steps.
        end_s: when the last request ended.
    """

    replicas: list[Replica]
    ended: list[Job] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return max((job.last_s for job in self.ended), default=0.0)


def simulate(scenario: Scenario, progress: Callable[[int, int], None] = lambda _done, _all: None) -> Run:
    """Runs a scenario to its end.

    Args:
        scenario: what to simulate.
        progress: told now and then how many requests are through, and how many there are.

    Raises:
        ConfigError: the profile lacks the drafter.
    """
    simulation = _Simulation(scenario)
    while simulation.advance():
        if len(simulation.run.replicas[0].steps) % 256 == 0:
            progress(len(simulation.run.ended) + len(simulation.run.refused), len(scenario.trace))
    return simulation.run


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        policy = scenario.policy
        config = scenario.engine_config
        draft = None if policy.name == OFF else scenario.profile.drafter(config.drafter)
        limit = 0 if draft is None else policy.length if policy.length is not None else draft.limit
        self._scenario = scenario
        self._law = AcceptanceLaw(scenario.categories, scenario.seed)
        self._spec = OFF if draft is None else config.drafter
        self._arrivals: list[tuple[float, int]] = []  # (seconds, number in the trace), a heap
        self._next = 0  # first request of the trace that is not among the arrivals
        self.run = Run(
            [
                Replica(index, config, scenario.profile, draft, lambda _: limit, Noise(scenario.noise, scenario.seed + index))
                for index in range(scenario.replicas)
            ]
        )
        for _ in range(len(scenario.trace) if scenario.concurrency is None else scenario.concurrency):
            self._schedule(0.0)

    def advance(self) -> bool:
        """One arrival or one step, whichever comes first; False when all is done."""
        busy = [replica for replica in self.run.replicas if replica.num_requests]
        replica = min(busy, key=lambda r: r.now_s) if busy else None
        if self._arrivals and (replica is None or self._arrivals[0][0] <= replica.now_s):
            self._arrive(*heapq.heappop(self._arrivals))
            return True
        if replica is None:
            return False
        ended = replica.step()
        self.run.ended += ended
        if self._scenario.concurrency is not None:
            for _ in ended:
                self._schedule(replica.now_s)
        return True

    def _schedule(self, now_s: float) -> None:
        """Puts the trace's next request among the arrivals: at its own time, or now where requests come as others end."""
        if self._next < len(self._scenario.trace):
            at = self._scenario.trace[self._next].arrival_s if self._scenario.concurrency is None else now_s
            heapq.heappush(self._arrivals, (at, self._next))
            self._next += 1

    def _arrive(self, now_s: float, number: int) -> None:
        traced, config = self._scenario.trace[number], self._scenario.config
        replica = min(self.run.replicas, key=lambda r: r.num_requests)
        request = Request(
            id=str(number),
            tokens=traced.prompt(_FIRST_UNIQUE + number),
            num_prompt=traced.num_prompt,
            params=_PARAMS,
            seed=0,
            max_length=replica.max_length,
            drafter=self._spec,
            arrival_s=now_s,
            target_itl_s=_seconds(config.target_itl_ms),
            target_ttft_s=_seconds(config.target_ttft_ms),
        )
        try:
            replica.add(Job(number, request, self._law.fate(number, traced.num_output), traced.num_output))
        except RequestError as error:
            self.run.refused.append((number, error.code or "refused"))
            if self._scenario.concurrency is not None:
                self._schedule(now_s)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
