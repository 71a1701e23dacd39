"""Prompt lookup: the incremental index against a plain search, and the trees it grows."""

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import ngram_reference
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.ngram_reference import CANDIDATES, Index, Match, grow_tree
from specdec.kernels import ngram as kernel
from specdec.testing import make_row


def plain_search(tokens, shortest, longest):
    """end -> match length of every earlier occurrence of the last `shortest` tokens."""
    found = {}
    for end in range(shortest, len(tokens)):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= shortest:
            found[end] = length
    return found


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5), st.integers(0, 6), st.integers(1, 9))
def test_index_agrees_with_a_plain_search(tokens, shortest, extra, step):
    longest = shortest + extra
    index = Index(shortest, longest)
    for length in [*range(1, len(tokens), step), len(tokens)]:
        text = tokens[:length]
        index.extend(text)
        expected = plain_search(text, shortest, longest)
        matches = index.matches(text, 4)
        assert len(matches) == min(CANDIDATES, len(expected))
        real = sorted((found, tuple(text[end : end + 4])) for end, found in expected.items())
        for match in matches:
            assert (match.length, tuple(match.follows)) in real
        if expected and max(expected.values()) >= min(longest, max(4, shortest)):
            assert max(match.length for match in matches) >= min(longest, max(4, shortest))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 12))
def test_trees_are_valid_and_within_limits(tokens, limit, depth):
    (tree,) = NgramDrafter().propose([make_row(tokens, limit=limit, depth=depth)])
    tree.validate(4)
    assert len(tree) <= limit and (not len(tree) or tree.depths().max() <= depth)
    children = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(children)) == len(children)


def test_copies_what_followed():
    tree = NgramDrafter().propose([make_row([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], limit=3)])[0]
    assert tree.is_chain() and tree.tokens.tolist() == [4, 5, 6]
    assert tree.confidence is not None and (tree.confidence > 0.5).all()


def test_text_that_repeats_goes_round():
    tree = NgramDrafter().propose([make_row([8, 1, 2, 3, 1, 2, 3], limit=7)])[0]
    assert tree.paths()[0][:7] == [1, 2, 3, 1, 2, 3, 1]
    constant = NgramDrafter().propose([make_row([7] * 9, limit=5)])[0]
    assert constant.tokens.tolist() == [7] * 5 and constant.is_chain()


def test_several_continuations_make_a_tree():
    text = [1, 2, 3, 4, 10, 11, 1, 2, 3, 4, 20, 21, 1, 2, 3, 4]
    tree = NgramDrafter().propose([make_row(text, limit=4)])[0]
    assert {path[0] for path in tree.paths()} == {10, 20}
    roots = [node for node, parent in enumerate(tree.parents.tolist()) if parent == -1]
    assert len(roots) == 2


def test_the_longer_match_comes_first():
    matches = [Match(1, [5, 6]), Match(9, [7, 8])]
    tree = grow_tree(matches, 4, 2)
    assert tree.tokens[0] == 7 and tree.confidence[0] > tree.confidence[tree.tokens.tolist().index(5)]


def test_nothing_known_nothing_proposed():
    drafter = NgramDrafter(min=2)
    assert [len(tree) for tree in drafter.propose([make_row([1, 2, 3]), make_row([4], request_id="b")])] == [0, 0]
    assert grow_tree([], 4, 4).tokens.dtype == np.int32


def test_rows_do_not_mix_and_forget_drops_the_index():
    drafter = NgramDrafter()
    a, b = make_row([1, 2, 1], request_id="a", limit=1), make_row([1, 3, 1], request_id="b", limit=1)
    assert [tree.tokens.tolist() for tree in drafter.propose([a, b])] == [[2], [3]]
    drafter.forget("a")
    drafter.forget("never seen")
    assert set(drafter._indexes) == {"b"}
    assert drafter.propose([make_row([4, 5, 4], request_id="a", limit=1)])[0].tokens.tolist() == [5]


def test_incremental_equals_from_scratch():
    random.seed(1)
    tokens = [random.randrange(6) for _ in range(300)]
    drafter = NgramDrafter()
    for length in range(1, 300, 3):
        row = make_row(tokens[:length])
        assert drafter.propose([row])[0] == NgramDrafter().propose([row])[0]


def test_cost_does_not_grow_with_the_text():
    random.seed(2)
    tokens = [random.randrange(500) for _ in range(40_000)]

    def seconds(length):
        drafter = NgramDrafter()
        drafter.propose([make_row(tokens[:length])])
        rows = [make_row(tokens[: length + i]) for i in range(1, 60)]
        times = []
        for row in rows:
            start = time.perf_counter()
            drafter.propose([row])
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    assert seconds(39_000) < 8 * seconds(1_000) + 50e-6


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 5), st.integers(0, 28), st.integers(1, 40), st.integers(1, 9))
def test_the_compiled_lookup_equals_its_reference(tokens, shortest, extra, limit, step):
    """Nodes, their order and their confidences, for two texts that grow side by side."""
    if not kernel.is_available():
        pytest.skip("no C++ compiler: the reference is what runs")
    plain, fast = ([module.Index(shortest, min(32, shortest + extra)) for _ in range(2)] for module in (ngram_reference, kernel))
    for length in [*range(1, len(tokens), step), len(tokens)]:
        texts, limits, depths = [tokens[:length], tokens[: length // 2]], [limit, 5], [min(limit, 12), 3]
        wanted = ngram_reference.grow_trees(plain, texts, limits, depths)
        found = kernel.grow_trees(fast, texts, limits, depths)
        assert found == wanted
        for tree, other in zip(found, wanted, strict=True):
            assert len(tree) == 0 or tree.confidence.tolist() == other.confidence.tolist()
