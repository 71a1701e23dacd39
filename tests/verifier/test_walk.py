from specdec.tree import EMPTY, DraftTree
from specdec.verifier.walk import walk

TREE = DraftTree.from_paths([[1, 2, 3], [1, 4], [5]])  # nodes: 0=1 1=2 2=3 3=4 4=5


def test_the_walk_follows_chosen_children_to_the_correction() -> None:
    #                    root  1  2  3  4  5
    assert walk(TREE, [1, 4, 9, 9, 7, 9]) == ([0, 3], 7)
    assert walk(TREE, [5, 9, 9, 9, 9, 2]) == ([4], 2)
    assert walk(TREE, [8, 2, 3, 9, 9, 9]) == ([], 8)


def test_an_accepted_leaf_gives_the_bonus() -> None:
    assert walk(TREE, [1, 2, 3, 6, 9, 9]) == ([0, 1, 2], 6)


def test_an_empty_tree_gives_the_plain_token() -> None:
    assert walk(EMPTY, [3]) == ([], 3)


def test_of_equal_siblings_the_first_counts() -> None:
    tree = DraftTree.chain([1, 2])
    twins = DraftTree(tree.tokens[[0, 0, 1]], tree.parents[[0, 0, 1]])  # two roots' children 1, then 2 under the first
    assert walk(twins, [1, 2, 9, 5]) == ([0, 2], 5)
