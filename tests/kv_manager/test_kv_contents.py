"""The slots of every request hold exactly what a forward of its tokens would have written there, whatever happened.

A fake model stands for the target and for one drafter with KV: the "KV" of a token is a hash of everything up to and
including it, so that a page shared, moved, copied or overwritten wrongly is seen at the slot where it happened.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.kv_manager import KVManager
from specdec.plan import BatchPlan, Row, RowOutcome
from specdec.request import Request, SamplingParams

DRAFT = "draft"
JUNK = -7
PLACES = 9
"""On the host: fewer than one request may want."""


def kv_of(before: int, token: int) -> int:
    return hash((before, token)) & 0x7FFF_FFFF_FFFF


def kv_prefix(tokens: Sequence[int]) -> list[int]:
    values, value = [], 0
    for token in tokens:
        value = kv_of(value, token)
        values.append(value)
    return values


class FakeStorage:
    """One integer per slot."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots = np.full(num_pages * page_size, -1, dtype=np.int64)
        self.host = np.full((PLACES, page_size), -2, dtype=np.int64)

    def copy_out(self, pages, places) -> None:
        self.host[list(places)] = self.slots.reshape(-1, self.page_size)[list(pages)]

    def copy_in(self, places, pages) -> None:
        self.slots.reshape(-1, self.page_size)[list(pages)] = self.host[list(places)]
        self.host[list(places)] = -3  # whoever fetched it has it alone

    def copy_pages(self, src, dst) -> None:
        pages = self.slots.reshape(-1, self.page_size)
        pages[dst] = pages[src]

    def move_slots(self, src, dst) -> None:
        self.slots[dst] = self.slots[src]


def random_tree(rng: random.Random, limit: int) -> list[int]:
    """Parents of up to `limit` nodes, sometimes a chain."""
    chain = rng.random() < 0.3
    return [node - 1 if chain else rng.randint(-1, node - 1) for node in range(rng.randint(0, limit))]


class World:
    """An engine without a model: reserve, a fake drafter, a fake forward, commit, and the comparison with the truth."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True, swap: bool = False) -> None:
        self.kv = KVManager(num_pages, page_size, prefix_cache=prefix_cache)
        self.target, self.draft = FakeStorage(num_pages, page_size), FakeStorage(num_pages, page_size)
        self.kv.register("target", self.target)
        self.kv.register(DRAFT, self.draft)
        if swap:
            self.kv.enable_swap(PLACES, itertools.count().__next__)
        self.live: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.contents: dict[tuple[bytes, str], tuple[int, ...]] = {}
        self.num_requests = 0
        self.moves = 0

    def request(self, tokens: Sequence[int], parent: str | None = None) -> Request:
        self.num_requests += 1
        return Request(f"r{self.num_requests}", list(tokens), len(tokens), SamplingParams(), 0, max_length=10_000, parent=parent)

    def admit(self, request: Request) -> int:
        """Admits, and holds `pages_needed` to its word: the same pages whether counted before or after."""
        num_tokens = len(request.tokens) + 3
        before, available = self.kv.pages_needed(request, num_tokens), self.kv.num_available
        cached = self.kv.admit(request)
        assert before == available - self.kv.num_available + self.kv.pages_needed(request, num_tokens)
        assert cached == self.kv.cached(request.id) < len(request.tokens)
        self.live[request.id] = request
        return cached

    def release(self, request: Request) -> None:
        del self.live[request.id]
        self.kv.release(request)

    def plan(self, wishes: Sequence[tuple[Request, int, int]]) -> BatchPlan:
        """Rows for (request, most pending, draft limit) as far as the pages go."""
        rows, available = [], self.kv.num_available
        for request, pending, limit in wishes:
            cached = self.kv.cached(request.id)
            pending = min(pending, len(request.tokens) - cached)
            limit = limit if cached + pending == len(request.tokens) else 0
            needed = self.kv.pages_needed(request, cached + pending + limit)
            if needed <= available:
                available -= needed
                rows.append(Row(request, cached, pending, limit, limit))
        return BatchPlan(tuple(rows))

    def slot(self, request: Request, position: int) -> int:
        size = self.kv.page_size
        return int(self.kv.pages(request.id)[position // size]) * size + position % size

    def run_drafter(self, row: Row, rng: random.Random, keep: int | None) -> None:
        """Catches up with the committed tokens, writes speculative junk behind them, states what it has."""
        request, kv = row.request, self.kv
        end = row.cached + row.pending
        values = kv_prefix(request.tokens)
        start = kv.cached(request.id, DRAFT)
        for position in range(start, end):
            self.draft.slots[self.slot(request, position)] = values[position]
        for position in range(end, end + row.draft_limit):
            self.draft.slots[self.slot(request, position)] = JUNK
        kv.set_cached(request.id, DRAFT, max(start, end) if keep is None else min(keep, end))

    def forward(self, row: Row, tree: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Writes the target's KV of pending tokens and nodes."""
        request, base = row.request, row.cached + row.pending
        values = kv_prefix(request.tokens)
        for position in range(row.cached, base):
            self.target.slots[self.slot(request, position)] = values[position]
        node_values: list[int] = []
        for node, parent in enumerate(tree):
            node_values.append(kv_of(values[base - 1] if parent < 0 else node_values[parent], tokens[node]))
            self.target.slots[self.slot(request, base + node)] = node_values[node]
        return node_values

    def step(self, wishes, rng: random.Random, vocab: int = 2, drafts: bool = True, accept: float = 0.7, error: float = 0.0) -> None:
        plan = self.plan(wishes)
        needed = sum(self.kv.pages_needed(row.request, row.cached + row.pending + row.draft_limit) for row in plan.rows)
        available = self.kv.num_available
        self.kv.reserve(plan)
        self.kv.check()
        self.verify()
        assert available - self.kv.num_available <= needed
        outcomes = []
        for row in plan.rows:
            if drafts and rng.random() < 0.7:
                self.run_drafter(row, rng, rng.randint(0, len(row.request.tokens)) if rng.random() < 0.2 else None)
            tree = random_tree(rng, row.draft_limit)
            tokens = [rng.randrange(vocab) for _ in tree]
            self.forward(row, tree, tokens)
            outcomes.append(self.outcome(row, tree, tokens, rng, vocab, accept, error))
            row.request.tokens.extend(outcomes[-1].emitted)
        self.kv.commit(plan, outcomes)
        self.moves += sum(outcome.path != tuple(range(len(outcome.path))) for outcome in outcomes)
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            if outcome.finish_reason == "error":
                assert self.kv.cached(row.request.id) == row.cached
            else:
                assert self.kv.cached(row.request.id) == min(row.cached + row.pending + len(outcome.path), len(row.request.tokens) - 1)
                assert len(self.kv.pages(row.request.id)) <= -(-len(row.request.tokens) // self.kv.page_size)
            if outcome.finish_reason:
                self.release(row.request)

    def outcome(self, row: Row, tree, tokens, rng: random.Random, vocab: int, accept: float, error: float) -> RowOutcome:
        if rng.random() < error:
            return RowOutcome(finish_reason="error", error="no finite logit")
        if not row.emits:
            return RowOutcome()
        path, node = [], -1
        while children := [child for child, parent in enumerate(tree) if parent == node]:
            if rng.random() > accept:
                break
            node = rng.choice(children)
            path.append(node)
        emitted = [tokens[node] for node in path] + [rng.randrange(vocab)]
        if rng.random() < 0.08:  # a stop somewhere in the block
            emitted = emitted[: rng.randint(1, len(emitted))]
            return RowOutcome(tuple(emitted), tuple(path[: len(emitted)]), "stop")
        return RowOutcome(tuple(emitted), tuple(path))

    def verify(self) -> None:
        for request in self.live.values():
            values = kv_prefix(request.tokens)
            for name, storage in (("target", self.target), (DRAFT, self.draft)):
                cached = self.kv.cached(request.id, name)
                held = [int(storage.slots[self.slot(request, position)]) for position in range(cached)]
                assert held == values[:cached], f"{request.id}: the slots of {name} do not hold its {cached} cached tokens"
        self.verify_published()

    def verify_published(self) -> None:
        """A digest stands for one content for ever, and a page marked complete for a drafter has the drafter's too."""
        cache, size = self.kv._cache, self.kv.page_size
        complete = dict(cache.complete_pages()).get(DRAFT, set())
        for digest, page in cache.entries():
            for name, storage in (("target", self.target), (DRAFT, self.draft)):
                if name == "target" or page in complete:
                    content = tuple(storage.slots[page * size : (page + 1) * size].tolist())
                    # The fake drafter's KV equals the fake target's, so one record serves both.
                    assert self.contents.setdefault((digest, ""), content) == content, f"page {page} lost its content in {name}"

    def random_prompt(self, rng: random.Random) -> list[int]:
        """One of few prompts, cut or continued at random, so that many requests start alike."""
        length, switch = rng.randint(1, 40), rng.choice([3, 9, 20, 33, 40])
        return [int(position >= switch) for position in range(length)]

    def admit_one(self, rng: random.Random) -> None:
        if self.waiting and rng.random() < 0.7:
            if self.kv.pages_needed(self.waiting[0], len(self.waiting[0].tokens)) <= self.kv.num_available:
                self.admit(self.waiting.pop(0))
        elif len(self.live) < 6:
            request = self.request(self.random_prompt(rng))
            hit = self.kv.lookup(request.tokens)
            assert self.admit(request) == hit

    def fork(self, rng: random.Random) -> None:
        if self.live and len(self.live) < 6:
            parent = rng.choice(list(self.live.values()))
            for _ in range(rng.randint(1, 2)):
                cached = self.admit(self.request(parent.tokens[: parent.num_prompt], parent.id))
                if self.kv.cached(parent.id) >= parent.num_prompt - 1:
                    assert cached == parent.num_prompt - 1

    def random_step(self, rng: random.Random, pending: int, limit: int, error: float = 0.0) -> None:
        rows = [request for request in self.live.values() if rng.random() < 0.8]
        rng.shuffle(rows)
        wishes = [(request, pending, rng.randint(0, limit)) for request in rows]
        if rows and not self.plan(wishes).rows:  # stuck for want of pages: what a scheduler would do
            self.preempt(rng)
        else:
            self.step(wishes, rng, error=error)

    def preempt(self, rng: random.Random) -> None:
        if self.live:
            request = rng.choice(list(self.live.values()))
            offer = self.kv.swap_offer(request)
            if offer is not None and rng.random() < 0.8:
                assert 0 < offer.tokens <= self.kv.cached(request.id) or self.kv.cached(request.id) == 0
                del self.live[request.id]
                self.kv.swap_out(request)
            else:
                self.release(request)
            self.waiting.append(request)

    def abort(self, rng: random.Random) -> None:
        if self.waiting and rng.random() < 0.3:
            self.kv.release(self.waiting.pop(rng.randrange(len(self.waiting))))
        elif self.live:
            self.release(rng.choice(list(self.live.values())))

    def reset(self) -> None:
        self.kv.reset_prefix_cache()
        assert not self.kv.published

    def drain(self) -> None:
        """With nobody running, every page is free or evictable."""
        for request in list(self.live.values()):
            self.release(request)
        for request in self.waiting:
            self.kv.release(request)
        self.kv.check()
        assert self.kv.num_available == self.kv.num_pages
        assert self.kv.swap is None or self.kv.swap.num_free == PLACES


class Machine(RuleBasedStateMachine):
    """Random requests on a tiny pool; books and contents are compared after every rule."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        scale=st.integers(2, 12),
        prefix_cache=st.sampled_from([True, True, False]),
        swap=st.booleans(),
    )
    def make(self, page_size: int, scale: int, prefix_cache: bool, swap: bool) -> None:
        self.world = World(scale * 16 // page_size, page_size, prefix_cache, swap)

    @rule(seed=st.integers(0, 2**32))
    def admit(self, seed: int) -> None:
        self.world.admit_one(random.Random(seed))

    @rule(seed=st.integers(0, 2**32))
    def fork(self, seed: int) -> None:
        self.world.fork(random.Random(seed))

    @rule(
        seed=st.integers(0, 2**32),
        pending=st.sampled_from([1, 3, 8, 100]),
        limit=st.integers(0, 9),
        error=st.sampled_from([0.0, 0.0, 0.2]),
        count=st.integers(1, 5),
    )
    def step(self, seed: int, pending: int, limit: int, error: float, count: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            self.world.random_step(rng, pending, limit, error)

    @rule(seed=st.integers(0, 2**32))
    def preempt(self, seed: int) -> None:
        self.world.preempt(random.Random(seed))

    @rule(seed=st.integers(0, 2**32))
    def abort(self, seed: int) -> None:
        self.world.abort(random.Random(seed))

    @rule(really=st.integers(0, 4))
    def reset(self, really: int) -> None:
        if really == 0:
            self.world.reset()

    @invariant()
    def books_and_contents(self) -> None:
        if hasattr(self, "world"):
            self.world.kv.check()
            self.world.verify()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("page_size", "num_pages", "prefix_cache"), [(1, 120, True), (4, 24, True), (4, 60, True), (16, 9, True), (4, 40, False)]
)
def test_contents_over_a_long_run(page_size, num_pages, prefix_cache, swap):
    """Longer and busier than hypothesis gets; the counters say that what should be exercised was."""
    rng = random.Random(page_size * 1000 + num_pages)
    world = World(num_pages, page_size, prefix_cache, swap)
    for _ in range(1000):
        action = rng.random()
        if action < 0.25:
            world.admit_one(rng)
        elif action < 0.35:
            world.fork(rng)
        elif action < 0.40:
            world.preempt(rng)
        elif action < 0.42:
            world.abort(rng)
        elif action < 0.43:
            world.reset()
        else:
            world.random_step(rng, rng.choice([1, 3, 8, 100]), rng.randint(0, 9), error=0.02)
        world.kv.check()
        world.verify()
    world.drain()
    stats = world.kv.stats
    assert world.moves > 20
    assert stats.queries > stats.hits > 200
    assert page_size == 1 or stats.copies > 10
    assert (stats.evictions > 20) == prefix_cache
    if swap:
        assert world.kv.swap.pages_out > world.kv.swap.pages_in > 3


def run_store(right_drafts: bool, limit: int, page_size: int) -> tuple[frozenset[bytes], int, int]:
    """Serves fixed outputs, several requests at a time, with drafts that are never or always right."""
    world = World(4000 // page_size, page_size)
    rng, truth = random.Random(7), random.Random(3)
    prompts = [[1] * truth.randint(1, 40) + [truth.randrange(5) for _ in range(truth.randint(0, 20))] for _ in range(12)]
    finals = [prompt + [truth.randrange(5) for _ in range(30)] for prompt in prompts]
    todo = list(zip(prompts, finals, strict=True))
    running: list[tuple[Request, list[int]]] = []
    while todo or running:
        # A fixed order of service, which speculation may not change: the next request starts when the batch has ended.
        if not running:
            for prompt, final in todo[:3]:
                request = world.request(prompt)
                world.admit(request)
                running.append((request, final))
            del todo[:3]
        plan = world.plan([(request, 16, limit) for request, _ in running])
        world.kv.reserve(plan)
        outcomes = []
        for row in plan.rows:
            final = next(final for request, final in running if request is row.request)
            right = final[len(row.request.tokens) :][: row.draft_limit] if right_drafts else []
            tokens = right + [99] * (row.draft_limit - len(right))
            world.run_drafter(row, rng, None)
            world.forward(row, [node - 1 for node in range(len(tokens))], tokens)
            path = tuple(range(len(right))) if row.emits else ()
            emitted = tuple(final[len(row.request.tokens) :][: len(path) + 1]) if row.emits else ()
            outcomes.append(RowOutcome(emitted, path))
            row.request.tokens.extend(emitted)
        world.kv.commit(plan, outcomes)
        world.kv.check()
        world.verify()
        for request, final in list(running):
            if len(request.tokens) == len(final):
                assert request.tokens == final
                world.release(request)
                running.remove((request, final))
    assert world.kv.num_available == world.kv.num_pages
    return world.kv.published, world.kv.stats.hits, world.kv.stats.queries


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_drafts_leave_no_trace_in_the_prefix_store(page_size):
    plain = run_store(False, 0, page_size)
    assert plain[0], "nothing was published"
    assert plain[1] > 0, "nothing was found"
    assert run_store(False, 5, page_size) == plain
    assert run_store(True, 5, page_size) == plain
