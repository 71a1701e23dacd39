"""A read-only view of a request's tokens, so that a drafter can look at them and never change them.

O(1) to make and no copy: the request's list only ever grows, so a fixed length is a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray


class TokenView(Sequence[int]):
    """The first `len(tokens)` items of a list that may grow later. Slices and sums are plain lists, free to change."""

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step > 0:
                return self._tokens[start:stop:step]
            return [self._tokens[i] for i in range(start, stop, step)]
        if index < 0:
            index += self._length
        if not 0 <= index < self._length:
            raise IndexError(f"token {index} of {self._length}")
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self._tokens), self._length)

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # a view of a list, so it cannot be a key

    def __repr__(self) -> str:
        return f"TokenView({self[:]!r})"

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:  # any dtype may be asked for
        if copy is False:
            raise ValueError("a TokenView becomes an array only by copying")
        return np.array(self[:], dtype=dtype if dtype is not None else np.int32)
