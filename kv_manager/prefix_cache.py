"""Which full pages of committed tokens can be found again by what they hold. It counts no references.

A page is named by the digest of its tokens and, through its parent's digest, of everything before them:

    digest[i] = blake2b(digest[i - 1] + bytes of the page's tokens)

so two prompts share a page exactly where they agree from the first token to the end of that page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np

_DIGEST_BYTES = 32
_TOKEN_BYTES = 4


class DigestChain:
    """Digests of the leading full pages of one growing token list; each page is hashed once."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._digests: list[bytes] = []

    def first(self, tokens: Sequence[int], count: int) -> Sequence[bytes]:
        """At least `count` leading digests. `tokens` must begin with those that earlier calls were given."""
        done = len(self._digests)
        if count > done:
            size = self.page_size
            data = np.asarray(tokens[done * size : count * size], dtype=np.int32).tobytes()
            parent = self._digests[-1] if done else b""
            step = size * _TOKEN_BYTES
            for start in range(0, len(data) - step + 1, step):
                parent = blake2b(parent + data[start : start + step], digest_size=_DIGEST_BYTES).digest()
                self._digests.append(parent)
        return self._digests


class PrefixCache:
    """Digest to page and back, and which published pages are complete in a drafter's storage too.

    A published page always has the target's KV; a drafter that ran for its writer has left its own KV as well.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._complete: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._digest_of

    def digest(self, page: int) -> bytes | None:
        """The digest under which `page` is published, None if it is not."""
        return self._digest_of.get(page)

    def digests(self) -> frozenset[bytes]:
        """All published digests: what the cache knows, whatever pages it lies in."""
        return frozenset(self._page_of)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Pages of the longest leading run of published `digests`."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, digest: bytes, page: int) -> bool:
        """Makes `page` findable; False where the same content is published in another page, or the page already is."""
        if digest in self._page_of or page in self._digest_of:
            return False
        self._page_of[digest] = page
        self._digest_of[page] = digest
        return True

    def withdraw(self, page: int) -> None:
        """Forgets a published page, because its content is about to be replaced."""
        del self._page_of[self._digest_of.pop(page)]
        for pages in self._complete.values():
            pages.discard(page)

    def clear(self) -> list[int]:
        """Forgets everything and returns the pages that were published."""
        pages = list(self._digest_of)
        self._page_of.clear()
        self._digest_of.clear()
        self._complete.clear()
        return pages

    def mark(self, storage: str, page: int, complete: bool) -> None:
        """States whether `page` is complete in a drafter's storage; nothing happens if it is not published."""
        if complete and page in self._digest_of:
            self._complete.setdefault(storage, set()).add(page)
        elif not complete:
            self._complete.get(storage, set()).discard(page)

    def leading_complete(self, storage: str, pages: Sequence[int]) -> int:
        """How many of the first `pages`, in one run, are complete in `storage`."""
        complete = self._complete.get(storage, set())
        for count, page in enumerate(pages):
            if page not in complete:
                return count
        return len(pages)

    def entries(self) -> Iterator[tuple[bytes, int]]:
        return iter(self._page_of.items())

    def complete_pages(self) -> Iterator[tuple[str, set[int]]]:
        """(storage name, published pages complete in it)."""
        return iter(self._complete.items())
