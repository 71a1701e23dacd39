"""KVManager, one promise at a time. What the slots hold after any mixture of them is test_kv_contents' business."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.errors import ConfigError, DrafterError, InvariantError
from specdec.kv_manager import KVManager
from specdec.plan import BatchPlan, Row, RowOutcome
from specdec.request import Request, SamplingParams


class Recorder:
    """A storage that only remembers what it was told."""

    def __init__(self) -> None:
        self.copies: list[tuple[list[int], list[int]]] = []
        self.moves: list[tuple[list[int], list[int]]] = []

    def copy_pages(self, src, dst) -> None:
        self.copies.append((list(src), list(dst)))

    def move_slots(self, src, dst) -> None:
        self.moves.append((src.tolist(), dst.tolist()))


def make_request(name: str, tokens, parent: str | None = None) -> Request:
    return Request(name, list(tokens), len(tokens), SamplingParams(), 0, max_length=1000, parent=parent)


def make_manager(num_pages: int = 32, page_size: int = 4, **options) -> tuple[KVManager, Recorder, Recorder]:
    kv = KVManager(num_pages, page_size, **options)
    target, draft = Recorder(), Recorder()
    kv.register("target", target)
    kv.register("draft", draft)
    return kv, target, draft


def step(kv: KVManager, request: Request, pending: int, emitted=(), path=(), limit: int = 0, finish: str | None = None) -> None:
    plan = BatchPlan((Row(request, kv.cached(request.id), pending, limit, limit),))
    kv.reserve(plan)
    request.tokens.extend(emitted)
    kv.commit(plan, [RowOutcome(tuple(emitted), tuple(path), finish)])
    kv.check()


def prefill(kv: KVManager, request: Request, emitted=(7,)) -> None:
    kv.admit(request)
    step(kv, request, len(request.tokens) - kv.cached(request.id), emitted)


def test_sizes_below_one_are_refused():
    with pytest.raises(ConfigError, match="page_size must be at least 1, got 0"):
        KVManager(4, 0)


def test_a_prompt_is_found_again_up_to_the_last_full_page_before_its_last_token():
    kv, _, _ = make_manager()
    first = make_request("a", range(8))
    prefill(kv, first)
    kv.release(first)
    kv.check()
    assert [kv.lookup(range(n)) for n in (3, 4, 5, 8, 9, 20)] == [0, 0, 4, 4, 8, 8]
    assert kv.lookup([9, *range(1, 20)]) == 0
    assert kv.admit(make_request("b", range(8))) == 4
    assert (kv.stats.queries, kv.stats.hits) == (16, 4)


def test_only_full_pages_of_committed_tokens_are_published():
    kv, _, _ = make_manager()
    request = make_request("a", range(3))
    kv.admit(request)
    step(kv, request, 2)
    assert not kv.published
    step(kv, request, 1, emitted=(3, 4), path=(0,), limit=6)  # 5 tokens, KV of 4: the drafts behind are not counted
    assert len(kv.published) == 1
    assert kv.lookup(range(9)) == 4


def test_the_accepted_path_moves_in_the_target_only():
    kv, target, draft = make_manager()
    request = make_request("a", range(6))
    prefill(kv, request)
    base = 7
    step(kv, request, 1, emitted=(10, 11, 12, 13), path=(0, 2, 5), limit=8)
    pages = kv.pages("a")

    def slot(position: int) -> int:
        return int(pages[position // 4]) * 4 + position % 4

    assert target.moves[0][0][1] // 4 not in pages, "node 5 lay on a page that was freed after the move"
    assert target.moves[0][0][0] == slot(base + 2)
    assert target.moves[0][1] == [slot(base + 1), slot(base + 2)]
    assert len(target.moves) == 1
    assert draft.moves == []
    assert kv.cached("a") == 10
    step(kv, request, 1, emitted=(1, 2, 3), path=(0, 1), limit=4)
    assert len(target.moves) == 1, "a chain never moves"


def test_a_stop_inside_an_accepted_block_leaves_the_last_token_without_kv():
    kv, _, _ = make_manager()
    request = make_request("a", range(4))
    prefill(kv, request)
    step(kv, request, 1, emitted=(1, 2), path=(0, 1), limit=5)
    assert kv.cached("a") == len(request.tokens) - 1 == 6


def test_the_tail_beyond_the_committed_tokens_is_freed():
    kv, _, _ = make_manager(page_size=4)
    request = make_request("a", range(4))
    kv.admit(request)
    free = kv.num_free
    plan = BatchPlan((Row(request, 0, 4, 12, 12),))
    assert kv.pages_needed(request, 16) == 4
    kv.reserve(plan)
    assert kv.num_free == free - 4
    assert len(kv.pages("a")) == 4
    request.tokens.append(5)
    kv.commit(plan, [RowOutcome((5,))])
    assert kv.num_free == free - 2


def test_a_failed_row_keeps_nothing_of_the_step():
    kv, _, _ = make_manager()
    request = make_request("a", range(9))
    kv.admit(request)
    step(kv, request, 9, finish="error")
    assert kv.cached("a") == 0
    kv.release(request)
    kv.check()
    assert kv.num_free == kv.num_pages
    assert not kv.published


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_fork_shares_the_partial_page_until_one_of_them_writes_it(prefix_cache):
    kv, target, draft = make_manager(prefix_cache=prefix_cache)
    parent = make_request("a", range(6))
    prefill(kv, parent)
    kv.set_cached("a", "draft", 6)
    child = make_request("b", range(6), parent="a")
    assert kv.pages_needed(child, 6) == 1
    assert kv.admit(child) == 5
    assert kv.cached("b", "draft") == 5
    assert kv.pages("a").tolist() == kv.pages("b").tolist()
    assert kv.pages_needed(child, 6) == 1
    step(kv, child, 1, (8,))
    assert kv.pages("a")[0] == kv.pages("b")[0]
    assert kv.pages("a")[1] != kv.pages("b")[1]
    assert target.copies == draft.copies == [([int(kv.pages("a")[1])], [int(kv.pages("b")[1])])]
    assert kv.pages_needed(parent, 7) == 0, "the last holder writes in place"


def test_a_fork_waits_for_nobody():
    kv, _, _ = make_manager()
    parent = make_request("a", range(6))
    kv.admit(parent)
    step(kv, parent, 4)
    assert kv.admit(make_request("b", range(6), parent="a")) == 4, "the parent has not run through; its full page is published"
    assert kv.admit(make_request("c", range(6), parent="gone")) == 4
    with pytest.raises(InvariantError, match="their prompts differ"):
        step(kv, parent, 2, (7,))
        kv.admit(make_request("d", [5, 5, 5, 5, 5, 5], parent="a"))


def test_the_end_of_a_sequence_is_evicted_before_its_beginning():
    kv, _, _ = make_manager(num_pages=4)
    first = make_request("a", range(13))
    prefill(kv, first)
    kv.release(first)
    assert (kv.num_free, kv.num_available) == (1, 4)
    hits = []
    other = make_request("b", [99] * 13)
    kv.admit(other)
    for _ in range(4):
        step(kv, other, 3)
        hits.append(kv.lookup(range(13)))
    assert hits == [12, 8, 4, 4]
    assert kv.stats.evictions == 2


def test_content_published_elsewhere_is_published_again_once_that_is_evicted():
    kv, _, _ = make_manager(num_pages=6)
    first, second = make_request("a", range(5)), make_request("b", range(5))
    kv.admit(first)
    kv.admit(second)
    step(kv, first, 5, (7,))
    step(kv, second, 5, (7,))
    assert len(kv.published) == 1, "the same content in two pages is published once"
    kv.release(first)
    filler = make_request("c", [99] * 13)
    kv.admit(filler)
    step(kv, filler, 13)
    assert kv.lookup(range(5)) == 0
    kv.release(second)
    kv.check()
    assert kv.lookup(range(5)) == 4


def test_a_drafter_finds_its_own_kv_only_where_it_was_written():
    kv, _, _ = make_manager()
    first = make_request("a", range(13))
    prefill(kv, first)
    kv.set_cached("a", "draft", 9)
    second = make_request("b", range(13))
    assert kv.admit(second) == 12
    assert kv.cached("b", "draft") == 8
    kv.set_cached("b", "draft", 12)
    assert kv.admit(make_request("c", range(13))) == 12
    assert kv.cached("c", "draft") == 12
    kv.set_cached("a", "draft", 3)  # "I lost it": nobody new may rely on these pages
    assert kv.admit(make_request("d", range(13))) == 12
    assert kv.cached("d", "draft") == 0
    kv.check()


def test_a_drafter_ahead_of_the_target_marks_pages_when_they_are_published():
    kv, _, _ = make_manager()
    request = make_request("a", range(9))
    kv.admit(request)
    plan = BatchPlan((Row(request, 0, 9),))
    kv.reserve(plan)
    kv.set_cached("a", "draft", 5)
    request.tokens.append(7)
    kv.commit(plan, [RowOutcome((7,))])
    kv.admit(make_request("b", range(9)))
    assert kv.cached("b", "draft") == 4


def test_a_drafter_cannot_mark_a_page_that_holds_a_siblings_tokens():
    kv, _, _ = make_manager()
    parent = make_request("a", range(6))
    prefill(kv, parent)
    child = make_request("b", range(6), parent="a")
    kv.admit(child)
    for _ in range(3):
        step(kv, parent, 1, (7,))
    parent_page = kv.pages("a")[1]
    other = make_request("c", range(6), parent="a")
    kv.admit(other)
    other.tokens.extend([1, 2])
    assert kv.pages("c")[1] == parent_page
    kv.set_cached("c", "draft", 8)  # slots of a page that this request does not own yet
    fresh = make_request("d", [*parent.tokens, 1])
    assert kv.admit(fresh) == 8
    assert kv.cached("d", "draft") == 4


@pytest.mark.parametrize(("storage", "count"), [("draft", 9), ("draft", -1), ("target", 1), ("unknown", 1)])
def test_a_drafter_that_states_nonsense_is_told(storage, count):
    kv, _, _ = make_manager()
    request = make_request("a", range(7))
    prefill(kv, request)
    with pytest.raises(DrafterError):
        kv.set_cached("a", storage, count)
    assert kv.cached("a", "draft") == 0
    kv.set_cached("a", "draft", 8)


def test_a_reset_forgets_what_is_published_and_what_runs():
    kv, _, _ = make_manager()
    done, running = make_request("a", range(9)), make_request("b", [*range(9), 50])
    prefill(kv, done)
    prefill(kv, running)
    kv.release(done)
    kv.reset_prefix_cache()
    kv.check()
    child = make_request("c", [*range(9), 50], parent="b")
    assert kv.admit(child) == 9
    step(kv, child, 1, (7,))
    kv.release(running)
    kv.release(child)
    kv.check()
    assert not kv.published
    assert kv.num_free == kv.num_pages
    fresh = make_request("d", range(9))
    prefill(kv, fresh)
    assert len(kv.published) == 2


def test_without_a_prefix_cache_nothing_is_kept():
    kv, _, _ = make_manager(prefix_cache=False)
    request = make_request("a", range(13))
    prefill(kv, request)
    assert kv.lookup(range(13)) == 0
    kv.release(request)
    kv.release(request)  # an abort may come after the end
    assert kv.num_free == kv.num_pages


def test_a_plan_that_does_not_fit_is_an_error_that_says_so():
    kv, _, _ = make_manager(num_pages=2)
    request = make_request("a", range(9))
    kv.admit(request)
    with pytest.raises(InvariantError, match="all 2 pages"):
        kv.reserve(BatchPlan((Row(request, 0, 9),)))
    with pytest.raises(InvariantError, match="does not fit 0 cached of 9"):
        kv.reserve(BatchPlan((Row(request, 3, 1),)))
    with pytest.raises(InvariantError, match="admitted twice"):
        kv.admit(request)
    with pytest.raises(InvariantError, match="no block table"):
        kv.pages("nobody")
    with pytest.raises(InvariantError, match="must ascend within 2 nodes"):
        plan = BatchPlan((Row(request, 0, 1, 2, 2),))
        kv.commit(plan, [RowOutcome((1, 2), (1, 0))])


def test_preempted_requests_find_their_own_pages():
    kv, _, _ = make_manager()
    request = make_request("a", range(6))
    prefill(kv, request)
    for token in range(7):
        step(kv, request, 1, (token,))
    kv.release(request)
    assert not kv.holds("a")
    assert kv.admit(request) == 12
    assert kv.cached("a") == 12


@pytest.mark.parametrize("damage", ["references", "free", "cached", "twice", "cache"])
def test_check_finds_books_that_do_not_balance(damage):
    kv, _, _ = make_manager()
    request = make_request("a", range(9))
    prefill(kv, request)
    kv.check()
    if damage == "references":
        kv._pool.share(int(kv.pages("a")[0]))
    elif damage == "free":
        kv._pool.release(int(kv.pages("a")[2]), keep=False)
    elif damage == "cached":
        kv._tables["a"].cached = 10
    elif damage == "twice":
        kv._tables["a"].pages[2] = int(kv.pages("a")[1])
    else:
        kv._cache.publish(b"x", kv._pool._free[0])
    with pytest.raises(InvariantError):
        kv.check()


def test_tables_are_int32_views_that_grow():
    kv, _, _ = make_manager(num_pages=64, page_size=1)
    request = make_request("a", range(40))
    prefill(kv, request)
    pages = kv.pages("a")
    assert pages.dtype == np.int32
    assert len(pages) == len(set(pages.tolist())) == 40
    assert not pages.flags.owndata
