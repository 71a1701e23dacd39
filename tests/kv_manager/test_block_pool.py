from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import InvariantError
from specdec.kv_manager.block_pool import BlockPool


def test_free_pages_go_first_then_the_longest_unused():
    pool = BlockPool(3)
    pages = [pool.take()[0] for _ in range(3)]
    assert sorted(pages) == [0, 1, 2]
    for page in (2, 0):
        pool.release(page, keep=True)
    pool.release(1, keep=False)
    assert (pool.num_free, pool.num_available) == (1, 3)
    assert [pool.take() for _ in range(3)] == [(1, False), (2, True), (0, True)]
    with pytest.raises(InvariantError, match="all 3 pages"):
        pool.take()


def test_a_shared_page_is_not_evictable_until_the_last_holder_lets_go():
    pool = BlockPool(1)
    page, _ = pool.take()
    pool.share(page)
    pool.release(page, keep=True)
    assert pool.num_available == 0
    pool.release(page, keep=True)
    pool.share(page)
    assert pool.num_available == 0
    pool.discard(page)  # referenced: stays
    assert pool.references(page) == 1
    pool.release(page, keep=True)
    pool.discard(page)
    assert pool.num_free == 1


def test_mistakes_are_found_where_they_happen():
    pool = BlockPool(2)
    with pytest.raises(InvariantError, match="free"):
        pool.share(0)
    with pytest.raises(InvariantError, match="more often"):
        pool.release(0, keep=True)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "keep", "free"]), st.integers(0, 4)), max_size=60))
def test_every_page_is_in_one_state(actions):
    pool, held = BlockPool(5), [0] * 5
    for action, page in actions:
        if action == "take" and pool.num_available:
            held[pool.take()[0]] += 1
        elif action == "share" and (held[page] or page in list(pool.evictable_pages())):
            pool.share(page)
            held[page] += 1
        elif action in ("keep", "free") and held[page]:
            pool.release(page, keep=action == "keep")
            held[page] -= 1
        assert [pool.references(page) for page in range(5)] == held
        states = [*pool.free_pages(), *pool.evictable_pages(), *(page for page in range(5) if held[page])]
        assert sorted(states) == list(range(5))
