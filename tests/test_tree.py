import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import DrafterError
from specdec.tree import EMPTY, DraftTree, are_valid


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12, vocabulary: int = 5) -> DraftTree:
    n = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, node - 1)) for node in range(n)]
    tokens = draw(st.lists(st.integers(0, vocabulary - 1), min_size=n, max_size=n))
    return DraftTree(np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32))


def test_a_chain_hangs_each_token_off_the_one_before() -> None:
    chain = DraftTree.chain([7, 8, 9])
    assert chain.parents.tolist() == [-1, 0, 1]
    assert chain.depths().tolist() == [1, 2, 3]
    assert chain.is_chain()
    assert DraftTree.chain([]) == EMPTY


def test_paths_share_their_common_prefix() -> None:
    tree = DraftTree.from_paths([[1, 2, 3], [1, 4], [5]])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5]
    assert tree.parents.tolist() == [-1, 0, 1, 0, -1]
    assert not tree.is_chain()


def test_earlier_paths_get_the_node_budget_first() -> None:
    assert DraftTree.from_paths([[1, 2], [3, 4]], max_nodes=3).paths() == [[1, 2], [3]]


@given(trees())
def test_paths_merge_back_into_a_tree_with_the_same_paths(tree: DraftTree) -> None:
    merged = DraftTree.from_paths(tree.paths())
    assert set(map(tuple, merged.paths())) <= set(map(tuple, tree.paths()))
    assert sorted(map(tuple, DraftTree.from_paths(merged.paths()).paths())) == sorted(map(tuple, merged.paths()))


@given(trees(), st.integers(0, 14), st.integers(0, 6))
def test_a_limited_tree_is_valid_and_within_its_limits(tree: DraftTree, nodes: int, depth: int) -> None:
    limited = tree.limited(nodes, depth)
    limited.validate(vocab_size=5)
    assert len(limited) <= nodes
    assert limited.depths().max(initial=0) <= depth
    original = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}
    assert all(tuple(limited.tokens[limited.path(node)].tolist()) in original for node in range(len(limited)))


@given(trees(), st.data())
def test_select_keeps_a_node_only_with_its_ancestors(tree: DraftTree, data: st.DataObject) -> None:
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(tree), max_size=len(tree))), dtype=bool)
    kept = [node for node in range(len(tree)) if all(keep[ancestor] for ancestor in tree.path(node))]
    selected = tree.select(keep)
    assert selected.tokens.tolist() == tree.tokens[kept].tolist()
    assert [selected.tokens[selected.path(i)].tolist() for i in range(len(kept))] == [tree.tokens[tree.path(n)].tolist() for n in kept]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (DraftTree(np.array([5], np.int32), np.array([-1], np.int32)), "must lie in"),
        (DraftTree(np.array([-1], np.int32), np.array([-1], np.int32)), "must lie in"),
        (DraftTree(np.array([0, 1], np.int32), np.array([1, -1], np.int32)), "parent must come before"),
        (DraftTree(np.array([0, 1], np.int32), np.array([-1, 1], np.int32)), "parent must come before"),
        (DraftTree(np.array([0], np.int32), np.array([-2], np.int32)), "parent must come before"),
        (DraftTree(np.array([0.5]), np.array([-1], np.int32)), "must be integers"),  # type: ignore[arg-type]
        (DraftTree(np.array([0, 1], np.int32), np.array([-1], np.int32)), "equally long"),
        (DraftTree.chain([1], confidence=np.array([np.nan], np.float32)), "confidence"),
        (DraftTree.chain([1], confidence=np.array([0.5, 0.5], np.float32)), "confidence"),
        (DraftTree.chain([1], q=np.zeros((1, 4))), "q must have shape"),
    ],
)
def test_a_bad_tree_is_refused_with_the_reason(tree: DraftTree, message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        tree.validate(vocab_size=5)


def test_a_shape_has_no_tokens_and_no_confidences_where_it_is_blind() -> None:
    tree = DraftTree(np.array([5, 6, 7]), np.array([-1, 0, -1]), np.array([0.5, 0.5, 0.9], dtype=np.float32))
    assert set(vars(tree.shape())) == {"parents", "confidence"}
    assert tree.shape().confidence is tree.confidence and tree.shape(blind=True).confidence is None
    assert tree.shape(blind=True).depths().tolist() == tree.depths().tolist() == [1, 2, 1]


def test_a_shape_says_which_nodes_lie_within_limits() -> None:
    shape = DraftTree.from_paths([[1, 2, 3], [4]]).shape()
    assert shape.within(9, 9).all()
    assert shape.within(9, 2).tolist() == [True, True, False, True]
    assert shape.within(2, 1).tolist() == [True, False, False, True]
    assert not shape.within(0, 5).any() and not shape.within(5, 0).any()


WALKED = DraftTree.from_paths([[1, 2, 3], [1, 4], [5]])  # nodes: 0=1 1=2 2=3 3=4 4=5


def test_the_walk_follows_chosen_children_to_the_correction() -> None:
    #                    root  1  2  3  4  5
    assert WALKED.walk([1, 4, 9, 9, 7, 9]) == ([0, 3], 7)
    assert WALKED.walk([5, 9, 9, 9, 9, 2]) == ([4], 2)
    assert WALKED.walk([8, 2, 3, 9, 9, 9]) == ([], 8)


def test_an_accepted_leaf_gives_the_bonus() -> None:
    assert WALKED.walk([1, 2, 3, 6, 9, 9]) == ([0, 1, 2], 6)


def test_an_empty_tree_gives_the_plain_token() -> None:
    assert EMPTY.walk([3]) == ([], 3)


def test_of_equal_siblings_the_first_counts() -> None:
    tree = DraftTree.chain([1, 2])
    twins = DraftTree(tree.tokens[[0, 0, 1]], tree.parents[[0, 0, 1]])  # two roots' children 1, then 2 under the first
    assert twins.walk([1, 2, 9, 5]) == ([0, 2], 5)


@given(st.lists(trees(), max_size=5), st.integers(3, 6), st.data())
def test_trees_looked_at_together_are_valid_if_each_is(drafts: list[DraftTree], vocabulary: int, data: st.DataObject) -> None:
    spoilt = [tree for tree in drafts if len(tree)]
    if spoilt and data.draw(st.booleans()):
        tree = data.draw(st.sampled_from(spoilt))
        tree.parents[data.draw(st.integers(0, len(tree) - 1))] = data.draw(st.integers(-2, len(tree)))

    def passes(tree: DraftTree) -> bool:
        try:
            tree.validate(vocabulary)
        except DrafterError:
            return False
        return True

    assert are_valid(drafts, vocabulary) == all(map(passes, drafts))


@pytest.mark.parametrize(
    "tree",
    [
        DraftTree(np.zeros(2, np.int32), np.full(2, -1, np.int32), np.array([0.5, np.nan], np.float32)),
        DraftTree(np.zeros(2, np.int32), np.full(2, -1, np.int32), np.array([0.5], np.float32)),
        DraftTree(np.zeros(2, np.int32), np.full(1, -1, np.int32)),
        DraftTree(np.zeros(2, np.int64), np.full(2, -1, np.int32)),  # valid, but not to be taken as it is
        DraftTree(np.zeros(1, np.int32), np.full(1, -1, np.int32), q=np.ones((1, 4))),
        "no tree",
    ],
)
def test_a_tree_that_must_be_looked_at_alone(tree: object) -> None:
    assert are_valid([EMPTY, DraftTree.chain([1])], 4)
    assert not are_valid([EMPTY, DraftTree.chain([1]), tree], 4)
