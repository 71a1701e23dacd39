"""Static shapes of draft trees: how many children the nodes of each level have, whatever is drawn.

`4-1-1-1` is four children of the root, each going on as a chain of three more:

    root ─┬─ 0 ── 4 ──  8 ── 12        nodes are numbered level by level, so that
          ├─ 1 ── 5 ──  9 ── 13        the first n of them are a tree
          ├─ 2 ── 6 ── 10 ── 14
          └─ 3 ── 7 ── 11 ── 15
"""

from __future__ import annotations

from specdec.errors import ConfigError

MAX_DEPTH = 64
MAX_NODES = 256


def parse_widths(text: str) -> tuple[int, ...]:
    """Children per node of each level.

    Raises:
        ConfigError: the text is not numbers of at least 1 joined by `-`, or the tree is deeper than 64 or has more than
            256 nodes.
    """
    words = text.split("-")
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise ConfigError(f"a tree is written as children per level, such as 4-2-1, each at least 1; got {text!r}")
    widths = tuple(map(int, words))
    if len(widths) > MAX_DEPTH or num_nodes(widths) > MAX_NODES:
        raise ConfigError(
            f"a tree may have {MAX_DEPTH} levels and {MAX_NODES} nodes; {text!r} has {len(widths)} levels and {num_nodes(widths)} nodes"
        )
    return widths


def num_nodes(widths: tuple[int, ...]) -> int:
    """Nodes of the whole tree."""
    total, level = 0, 1
    for width in widths:
        level *= width
        total += level
    return total
