"""Random numbers of the rules that need any: where a rule asks for them, and where a request's own come from.

Streams of the counter-based generator (`specdec.kernels.reference.philox`), all with the root's position as salt, since a
position that is drafted again after a rejection must not meet the numbers of the last time:

    stream   counter                          what
    1        (node, root position)            accept coins, one per node
    2        (token, position of the token)   the draw that ends a step
    3        (token, node drawn under)        drafts, when the rule reads q (specdec.verifier.sampling)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.kernels.reference import gumbel, philox

ACCEPT, RESIDUAL, DRAFT = 1, 2, 3

Floats = NDArray[np.float64]


class Randomness(Protocol):
    """What a rule's reference draws from: a request's coins, fixed ones, or every branch in turn (specdec.testing.prover)."""

    def accept(self, node: int, chance: float) -> bool:
        """True with probability `chance`; asked at most once for a node. Never true for a chance of 0."""
        ...

    def draw(self, depth: int, weights: Floats) -> int:
        """A token with probability proportional to its weight; `weights` float64 [vocabulary], one of them positive.

        Args:
            depth: accepted nodes before the token.
        """
        ...


Coins = Callable[[int, int, int], Floats]
"""(seed, root position, count) -> float64 [count], uniform in [0, 1): the accept coins of nodes 0, 1, ..."""


def accept_coins(seed: int, length: int, count: int) -> Floats:
    """The coins of a request at a step; implements `Coins`."""
    words = [word for block in range(-(-count // 4)) for word in _philox_block(seed, (block, length, ACCEPT, length))]
    return np.asarray(words[:count], dtype=np.float64) * 2.0**-32


def _philox_block(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The four words of `specdec.kernels.reference.philox` for one counter: 20 times as fast for so few."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


class PhiloxRandomness:
    """A request's own coins; implements `Randomness`.

    Args:
        seed: the request's.
        length: position of the root's token plus one, the committed tokens at this step.
        coins: another source of accept coins, for tests.
    """

    def __init__(self, seed: int, length: int, coins: Coins = accept_coins) -> None:
        self._seed = seed
        self._length = length
        self._coins = coins

    def accept(self, node: int, chance: float) -> bool:
        return bool(self._coins(self._seed, self._length, node + 1)[node] < chance)

    def draw(self, depth: int, weights: Floats) -> int:
        tokens = np.flatnonzero(weights > 0)
        noise = gumbel(philox(self._seed, tokens, self._length + depth, RESIDUAL, self._length))
        return int(tokens[np.argmax(np.log(weights[tokens]) + noise)])
