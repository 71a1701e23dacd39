"""The router with well-behaved and hostile drafters. Whatever they do, every row gets a valid tree, maybe empty."""

import itertools
import logging
import sys
import threading
import time

import numpy as np
import pytest
import torch

from specdec.config import EngineConfig
from specdec.drafters import registry
from specdec.drafters.base import Drafter
from specdec.drafters.lane import DRY_NODES, FAILING_STEPS
from specdec.drafters.router import MAX_ON_DEMAND, DrafterRouter
from specdec.errors import ConfigError, DrafterError, RequestError
from specdec.plan import BatchPlan, DraftNeeds, Row, RowOutcome
from specdec.request import Request, SamplingParams
from specdec.testing import OneHot, make_context
from specdec.tree import EMPTY, DraftTree

VOCAB = 16


@pytest.fixture(autouse=True)
def names():
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def router_of(*drafters, default=None, timeout_s=5.0, wants_q=False):
    specs = [item if isinstance(item, str) else registry.register_instance(item) for item in drafters]
    context = make_context(VOCAB, config=EngineConfig(draft_timeout_s=timeout_s))
    return DrafterRouter(context, default or "+".join(specs), lambda request: wants_q), specs


def row(drafter, limit=4, depth=4, tokens=(1, 2, 3, 1, 2), name="r", prediction=()):
    request = Request(name, list(tokens), len(tokens), SamplingParams(temperature=0), 0, 99, drafter=drafter, prediction=tuple(prediction))
    return Row(request, len(tokens) - 1, 1, limit, depth, drafter)


def propose(router, *rows):
    return router.propose(BatchPlan(rows))


class Answers(Drafter):
    """Answers whatever it is told to."""

    def __init__(self, answer, needs=None):
        self.answer = answer
        self.calls = 0
        self.seen, self.forgotten = [], []
        if needs is not None:
            self.needs = needs

    def propose(self, rows):
        self.calls += 1
        return self.answer(rows) if callable(self.answer) else self.answer

    def observe(self, outcomes):
        self.seen.extend(outcomes)

    def forget(self, request_id):
        self.forgotten.append(request_id)


def raising(error):
    def answer(rows):
        raise error

    return answer


def tree(tokens, parents=None, **fields):
    count = np.size(tokens)
    return DraftTree(np.asarray(tokens), np.arange(count) - 1 if parents is None else np.asarray(parents), **fields)


class Odd:
    """Raises wherever it is looked at."""

    def __getattr__(self, name):
        raise RuntimeError("do not touch")


def endless(rows):
    return endless(rows)


HOSTILE = {
    "raises": (raising(ValueError("no")), "raised"),
    "exits": (raising(SystemExit(1)), "raised"),
    "interrupts": (raising(KeyboardInterrupt()), "raised"),
    "times out by itself": (raising(TimeoutError("mine")), "raised"),
    "recurses": (endless, "raised"),
    "returns none": (None, "count"),
    "returns a tree": (lambda rows: DraftTree.chain([1]), "count"),
    "too few": ([], "count"),
    "too many": (lambda rows: [EMPTY] * (len(rows) + 1), "count"),
    "a generator": (lambda rows: (EMPTY for _ in rows), "count"),
    "lists": ([[1, 2, 3]], "tree"),
    "odd objects": ([Odd()], "tree"),
    "id too high": ([tree([1, VOCAB])], "tree"),
    "id negative": ([tree([-1])], "tree"),
    "id huge": ([tree([2**40])], "tree"),
    "ids float": ([tree([1.5])], "tree"),
    "ids nan": ([tree([float("nan")])], "tree"),
    "ids text": ([tree(["a"])], "tree"),
    "ids two-dimensional": ([tree([[1, 2]])], "tree"),
    "cycle": ([tree([1, 2], [1, 0])], "tree"),
    "own parent": ([tree([1], [0])], "tree"),
    "parent too low": ([tree([1], [-2])], "tree"),
    "parent after child": ([tree([1, 2, 3], [-1, 2, 0])], "tree"),
    "parents short": ([tree([1, 2], [-1])], "tree"),
    "nan confidence": ([tree([1, 2], confidence=np.array([0.5, np.nan], dtype=np.float32))], "tree"),
    "infinite confidence": ([tree([1], confidence=np.array([np.inf], dtype=np.float32))], "tree"),
    "confidence short": ([tree([1, 2], confidence=np.array([0.5], dtype=np.float32))], "tree"),
    "confidence text": ([tree([1], confidence=["x"])], "tree"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_drafter_costs_its_own_drafts_only(name, caplog):
    answer, kind = HOSTILE[name]
    bad, good = Answers(answer), OneHot(7)
    router, (bad_spec, good_spec) = router_of(bad, good)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            trees = propose(router, row(bad_spec, name="a"), row(good_spec, name="b"), row("ngram", name="c"), row("off", name="d"))
            assert [len(item) for item in trees] == [0, 4, 4, 0]
    assert router.errors[bad_spec] == {kind: 3} and not router.errors[good_spec]
    assert len([record for record in caplog.records if bad_spec in record.getMessage()]) == 1
    status = {item["name"]: item for item in router.status()}
    assert status[bad_spec]["last_error"] and status[bad_spec]["state"] == "active"
    router.close()


def test_a_default_dtype_that_a_drafter_sets_is_put_back():
    dtype = torch.get_default_dtype()

    def meddle(rows):
        torch.set_default_dtype(torch.float64)
        return [DraftTree.chain([1])]

    router, (spec,) = router_of(Answers(meddle))
    assert [len(item) for item in propose(router, row(spec))] == [1]
    assert torch.get_default_dtype() == dtype
    assert router.errors[spec] == {"dtype": 1}
    router.close()


def test_one_bad_tree_of_several_drops_only_that_one():
    router, (spec,) = router_of(Answers(lambda rows: [DraftTree.chain([1]), tree([99])]))
    assert [len(item) for item in propose(router, row(spec, name="a"), row(spec, name="b"))] == [1, 0]
    assert router.errors[spec] == {"tree": 1}


def test_too_many_or_too_deep_nodes_are_cut():
    router, (spec,) = router_of(Answers(lambda rows: [DraftTree.chain([1] * 10_000), DraftTree.chain(range(9))]))
    first, second = propose(router, row(spec, limit=5, depth=9), row(spec, limit=9, depth=3, name="b"))
    assert len(first) == 5 and second.tokens.tolist() == [0, 1, 2]
    assert router.errors[spec] == {}


def test_a_drafter_that_hangs_is_switched_off_and_the_rest_goes_on(caplog):
    release = threading.Event()
    hanging = Answers(lambda rows: release.wait(30) and [EMPTY])
    router, (spec, good) = router_of(hanging, OneHot(7), timeout_s=0.05)
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            trees = propose(router, row(spec, name="a"), row(good, name="b"))
            assert [len(item) for item in trees] == [0, 4]
    assert time.perf_counter() - start < 20.0 and hanging.calls == 1  # not the 30 s that it hangs
    assert "draft_timeout_s = 0.05" in caplog.text
    status = {item["name"]: item["state"] for item in router.status()}
    assert status == {spec: "failed", good: "active"}
    assert router.default_limit(spec) == 0 and router.default_limit(good) == 1
    router.forget("a")
    release.set()
    router.close()


@pytest.mark.parametrize("method", ["observe", "forget"])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)])
def test_errors_outside_propose_are_counted_too(method, error):
    def fail(*_):
        raise error

    subclass = type("Failing", (Answers,), {method: fail})
    router, (spec,) = router_of(subclass([EMPTY]))
    plan = BatchPlan((row(spec),))
    trees = router.propose(plan)
    router.observe(plan, trees, [RowOutcome((5,))], lambda index: {})
    router.forget("r")
    assert router.errors[spec] == {"raised": 1}


def test_mutating_what_it_is_given_harms_nobody():
    def vandal(rows):
        rows[0].tokens[:].clear()
        np.asarray(rows[0].tokens)[:] = 0
        rows[0].tokens[0] = 5

    router, (spec,) = router_of(Answers(vandal))
    one = row(spec)
    assert len(propose(router, one)[0]) == 0 and one.request.tokens == [1, 2, 3, 1, 2]
    assert "does not support item assignment" in router.status()[0]["last_error"]


def test_trees_are_copies_in_int32():
    tokens = np.array([1, 2, 3], dtype=np.int64)
    router, (spec,) = router_of(Answers([DraftTree(tokens, np.arange(3) - 1)]))
    (got,) = propose(router, row(spec))
    tokens[:] = 99
    assert got.tokens.tolist() == [1, 2, 3] and got.tokens.dtype == got.parents.dtype == np.int32


def test_q_passes_only_where_it_is_wanted_declared_and_right():
    q = torch.full((1, VOCAB), 1 / VOCAB)
    with_q = [DraftTree.chain([1], q=q)]
    for needs, wanted, expected in ((DraftNeeds(q=True), True, True), (DraftNeeds(), True, False), (DraftNeeds(q=True), False, False)):
        router, (spec,) = router_of(Answers(with_q, needs), wants_q=wanted)
        (got,) = propose(router, row(spec))
        assert (got.q is not None) == expected and got.q is not q
    for wrong in (q[:, :3], [[0.5]], q.to(torch.int64)):
        router, (spec,) = router_of(Answers([DraftTree.chain([1], q=wrong)], DraftNeeds(q=True)))
        assert len(propose(router, row(spec))[0]) == 0 and router.errors[spec] == {"tree": 1}


def test_each_drafter_is_called_once_and_only_for_rows_that_draft():
    counted = Answers(lambda rows: [DraftTree.chain([1])] * len(rows))
    router, (spec,) = router_of(counted)
    prefill = row(spec, name="d")
    trees = propose(
        router,
        row(spec, name="a"),
        row("off", name="b"),
        row(spec, name="c"),
        Row(prefill.request, 0, 2, 4, 4, spec),
        row(spec, limit=0, name="e"),
        row(spec, depth=0, name="f"),
    )
    assert [len(item) for item in trees] == [1, 0, 1, 0, 0, 0] and counted.calls == 1
    assert set(router.draft_s) == {spec} and router.draft_s[spec] > 0
    propose(router, row("off"))
    assert router.draft_s == {}


def test_observe_tells_every_row_of_the_drafter_with_the_states_it_needs():
    drafter = Answers(lambda rows: [DraftTree.chain([1, 2])] * len(rows), DraftNeeds(hidden_layers=(3,)))
    router, (spec,) = router_of(drafter)
    assert router.needs == DraftNeeds(hidden_layers=(3,))
    plan = BatchPlan((row(spec, name="a"), row("off", name="b"), row(spec, limit=0, name="c")))
    trees = router.propose(plan)
    outcomes = [RowOutcome((1, 5), (0,)), RowOutcome((6,)), RowOutcome((7,))]
    router.observe(plan, trees, outcomes, lambda index: {3: torch.full((1,), index), 4: torch.zeros(1)})
    assert [(o.request_id, o.path, o.emitted, len(o.tree)) for o in drafter.seen] == [("a", (0,), (1, 5), 2), ("c", (), (7,), 0)]
    assert [o.hidden[3].item() for o in drafter.seen] == [0, 2] and set(drafter.seen[0].hidden) == {3}
    status = router.status()[0]
    assert (status["drafted"], status["accepted"]) == (2, 1)
    router.forget("a")
    router.forget("b")
    assert drafter.forgotten == ["a"]


def test_merged_drafters_share_the_budget_and_keep_their_own_books():
    first = Answers(lambda rows: [DraftTree.from_paths([[1, 2]])] * len(rows))
    second = Answers(lambda rows: [DraftTree.from_paths([[1, 3], [4]])] * len(rows))
    router, specs = router_of(first, second)
    merged = "+".join(specs)
    plan = BatchPlan((row(merged, limit=3),))
    (got,) = trees = router.propose(plan)
    assert got.paths() == [[1, 2], [1, 3]]
    router.observe(plan, trees, [RowOutcome((1, 3, 9), (0, 2))], lambda index: {})
    assert [(item["drafted"], item["accepted"]) for item in router.status()] == [(2, 1), (2, 2)]
    assert len(first.seen) == len(second.seen) == 1
    assert router.default_limit(merged) == sum(router.default_limit(spec) for spec in specs)


def test_a_merged_drafter_that_fails_leaves_the_other():
    router, specs = router_of(Answers(raising(ValueError("no"))), OneHot(7, limit=4))
    (got,) = propose(router, row("+".join(specs)))
    assert got.tokens.tolist() == [7, 7, 7, 7]


def test_nothing_accepted_is_degraded_until_something_is(caplog):
    router, (spec,) = router_of(OneHot(7, limit=8))
    plan = BatchPlan((row(spec, limit=8, depth=8),))
    with caplog.at_level(logging.WARNING):
        for _ in range(DRY_NODES // 8):
            assert router.status()[0]["state"] == "active"
            router.observe(plan, router.propose(plan), [RowOutcome((1,))], lambda index: {})
        for _ in range(3):
            assert router.status()[0]["state"] == "degraded"
            router.observe(plan, router.propose(plan), [RowOutcome((1,))], lambda index: {})
    assert len(caplog.records) == 1 and "degraded" in caplog.text
    router.observe(plan, router.propose(plan), [RowOutcome((7, 1), (0,))], lambda index: {})
    assert router.status()[0]["state"] == "active"


def test_errors_in_every_step_are_degraded_until_one_goes_well():
    answers = iter([None] * FAILING_STEPS + [[EMPTY]])
    router, (spec,) = router_of(Answers(lambda rows: next(answers)))
    for _ in range(FAILING_STEPS):
        propose(router, row(spec))
    assert router.status()[0]["state"] == "degraded"
    propose(router, row(spec))
    assert router.status()[0]["state"] == "active"


def test_check_lets_light_and_configured_drafters_pass():
    router, (spec,) = router_of(OneHot(7))
    for text in ("off", "ngram", "ngram(min=2,max=4)", "prediction", "ngram+prediction", spec, f"{spec}+ngram"):
        router.check(text)
    propose(router, row("ngram(min=2,max=4)"), row(spec, name="b"))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("model:/models/x", "configured"),
        ("model:org/name", "configured"),
        ("os:system", "configured"),
        ("subprocess:Popen", "configured"),
        ("ngram+model:org/name", "configured"),
        ("ngrm", "did you mean 'ngram'"),
        ("model", "needs a target"),
        ("ngram(mim=2)", "did you mean 'min'"),
        ("ngram(min=9,max=2)", "min=9"),
        ("ngram(", "expected NAME"),
        ("", "expected NAME"),
        ("off+ngram", "stands alone"),
    ],
)
def test_check_refuses_the_rest_and_names_the_field(text, word):
    router, _ = router_of(OneHot(7))
    with pytest.raises(RequestError) as caught:
        router.check(text)
    assert caught.value.param == "drafter" and word in str(caught.value)


def test_a_default_that_is_wrong_or_cannot_be_built_fails_at_once():
    with pytest.raises(ConfigError, match="unknown drafter"):
        router_of(default="nothing")
    with pytest.raises(DrafterError, match="SystemExit"):
        router_of(default=registry.register_instance(lambda context: sys.exit(1)))
    for field, value in (("default_limit", 0), ("needs", None)):
        broken = OneHot(7)
        setattr(broken, field, value)
        with pytest.raises(DrafterError, match=field):
            router_of(broken)


def test_a_registered_drafter_that_cannot_be_built_is_the_requests_error():
    router, _ = router_of(OneHot(7))
    with pytest.raises(RequestError, match="ValueError: no") as caught:
        router.check(registry.register_instance(lambda context: raising(ValueError("no"))(None)))
    assert caught.value.param == "drafter"


def test_on_demand_drafters_do_not_pile_up():
    router, (spec,) = router_of(OneHot(7))
    busy = row("ngram(limit=9)", name="busy")
    for limit in range(1, 200):
        router.check(f"ngram(limit={limit})")
        assert len(propose(router, busy, row(spec, name="b"))[0]) == 4
    assert len(router.status()) <= MAX_ON_DEMAND + 1
    assert {"ngram(limit=9)", spec} <= {item["name"] for item in router.status()}


def test_a_drafter_gone_bad_between_check_and_step_costs_drafts_only(caplog):
    router, _ = router_of(OneHot(7))
    with caplog.at_level(logging.WARNING):
        assert [len(item) for item in propose(router, row("vanished"), row("ngram", name="b"))] == [0, 4]
        assert router.default_limit("vanished") == 0
    assert caplog.text.count("vanished") >= 1 and len(caplog.records) == 1


def test_user_code_runs_in_its_own_thread_and_built_ins_in_place():
    threads = []
    router, (spec,) = router_of(lambda tokens, limit: threads.append(threading.current_thread()) or [1])
    assert len(propose(router, row(spec), row("ngram", name="b"))[0]) == 1
    assert threads[0] is not threading.current_thread() and threads[0].daemon and spec in threads[0].name
    router.close()
    threads[0].join(5)
    assert not threads[0].is_alive()


def test_ctrl_c_in_a_built_in_drafter_is_the_users(monkeypatch):
    router, _ = router_of(OneHot(7))
    monkeypatch.setattr("specdec.drafters.ngram.NgramDrafter.propose", lambda *_: raising(KeyboardInterrupt())(None))
    with pytest.raises(KeyboardInterrupt):
        propose(router, row("ngram"))


@pytest.mark.parametrize("layers", [(-1,), ("0",), (True,)])
def test_a_drafter_that_asks_for_layers_that_do_not_exist_is_refused_when_it_is_built(layers):
    class Asking(Drafter):
        needs = DraftNeeds(hidden_layers=layers)

        def propose(self, rows):
            return [EMPTY] * len(rows)

    with pytest.raises(DrafterError, match="hidden_layers"):
        router_of(Asking())


def test_an_endless_draft_is_cut():
    router, (name,) = router_of(lambda tokens, limit: itertools.cycle(tokens))
    (tree,) = router.propose(BatchPlan((row(name),)))
    assert tree.tokens.tolist() == [1, 2, 3, 1]
    router.close()


def test_a_list_that_exits_when_it_is_read_is_an_error_of_the_drafter():
    class Liar(list):
        def __iter__(self):
            raise SystemExit(3)

    class Lying(Drafter):
        def propose(self, rows):
            return Liar([EMPTY] * len(rows))

    router, (name,) = router_of(Lying())
    assert router.propose(BatchPlan((row(name),))) == [EMPTY]
    assert sum(router.errors[name].values()) == 1
    router.close()
