"""The pages of one request, in order, and how far each storage has filled them. It takes and frees no page itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.kv_manager.prefix_cache import DigestChain
from specdec.request import Request

TARGET = "target"
"""Name of the target's storage."""


class PageList:
    """int32 page ids in a buffer that doubles, so that appending and viewing cost nothing per page held."""

    def __init__(self, pages: Sequence[int] = ()) -> None:
        self._length = len(pages)
        self._buffer = np.zeros(max(8, len(pages)), dtype=np.int32)
        self._buffer[: self._length] = pages

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._length:
            raise IndexError(f"page index {index} of {self._length}")
        return int(self._buffer[index])

    def __setitem__(self, index: int, page: int) -> None:
        if not 0 <= index < self._length:
            raise IndexError(f"page index {index} of {self._length}")
        self._buffer[index] = page

    def append(self, page: int) -> None:
        if self._length == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros_like(self._buffer)])
        self._buffer[self._length] = page
        self._length += 1

    def truncate(self, length: int) -> list[int]:
        """Drops the pages from `length` on and returns them, the first one first."""
        if length >= self._length:
            return []
        dropped: list[int] = self._buffer[length : self._length].tolist()
        self._length = length
        return dropped

    def view(self) -> NDArray[np.int32]:
        """int32 [len(self)], read only and not a copy: valid until the next append."""
        view = self._buffer[: self._length]
        view.flags.writeable = False  # drafters see it, and a page written there would be another request's
        return view


@dataclass
class BlockTable:
    """What one request holds.

        slots   |0 ........................|cached ........|len(pages) * page_size
                | committed, KV is there   | to be written |
        pages   | shared or own            | own, once reserved

    Attributes:
        request: the request; its tokens say what the slots hold.
        chain: digests of its full pages.
        pages: its pages in order.
        cached: leading tokens whose target KV is in the pool.
        draft_cached: the same for the drafters' storages, by name; absent is 0.
        num_offered: leading pages that were offered to the prefix cache.
        publishes: False once a reset of the prefix cache has outdated its content.
    """

    request: Request
    chain: DigestChain
    pages: PageList
    cached: int
    draft_cached: dict[str, int] = field(default_factory=dict)
    num_offered: int = 0
    publishes: bool = True

    def slots(self, positions: Sequence[int], page_size: int) -> list[int]:
        """Flat slots (page * page_size + offset) of `positions`; cheaper than numpy for as few as there are in a step."""
        return [self.pages[at // page_size] * page_size + at % page_size for at in positions]
