from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.kv_manager.prefix_cache import DigestChain, PrefixCache

tokens_lists = st.lists(st.integers(0, 2), max_size=24)


@given(first=tokens_lists, second=tokens_lists, page_size=st.integers(1, 5))
def test_digests_agree_exactly_where_the_tokens_before_agree(first, second, page_size):
    chains = [DigestChain(page_size).first(tokens, len(tokens) // page_size) for tokens in (first, second)]
    for index in range(min(len(chains[0]), len(chains[1]))):
        end = (index + 1) * page_size
        assert (chains[0][index] == chains[1][index]) == (first[:end] == second[:end])


@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=30), page_size=st.integers(1, 5), cut=st.integers(0, 30))
def test_a_chain_may_be_extended_piece_by_piece(tokens, page_size, cut):
    chain = DigestChain(page_size)
    chain.first(tokens[:cut], len(tokens[:cut]) // page_size)
    count = len(tokens) // page_size
    assert chain.first(tokens, count) == DigestChain(page_size).first(tokens, count)
    assert len(chain.first(tokens, 0)) == count, "digests are kept"


def test_a_match_stops_at_the_first_page_that_is_gone():
    cache = PrefixCache()
    for index, digest in enumerate((b"a", b"b", b"c")):
        assert cache.publish(digest, index)
    assert not cache.publish(b"a", 9), "the content is published in page 0"
    assert not cache.publish(b"d", 0), "a page has one content"
    assert cache.match([b"a", b"b", b"c", b"x"]) == [0, 1, 2]
    cache.mark("draft", 1, complete=True)
    cache.mark("draft", 9, complete=True)  # not published, so there is nothing to mark
    cache.withdraw(1)
    assert cache.match([b"a", b"b", b"c"]) == [0]
    assert 1 not in cache
    assert cache.publish(b"b", 1)
    assert cache.leading_complete("draft", [1, 9]) == 0, "a mark ends with the content it was made for"
    assert sorted(cache.clear()) == [0, 1, 2]
    assert cache.digests() == frozenset()


def test_leading_complete_counts_up_to_the_first_gap():
    cache = PrefixCache()
    for page in range(4):
        cache.publish(bytes([page]), page)
    for page in (0, 1, 3):
        cache.mark("draft", page, complete=True)
    assert cache.leading_complete("draft", [0, 1, 2, 3]) == 2
    assert cache.leading_complete("other", [0]) == 0
