"""Seeds of requests that bring none, and of the choices of one request. Pure functions of their arguments."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *path: int) -> int:
    """A 64-bit seed derived from `seed` and the integers of `path`, unrelated to those of any other path."""
    digest = hashlib.blake2b(digest_size=8)
    for value in (seed, *path):
        digest.update(value.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a request; the first has the request's own."""
    return seed if choice == 0 else derive_seed(seed, choice)
