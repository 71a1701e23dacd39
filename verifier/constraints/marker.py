"""The text behind which a constraint begins, found in bytes that come token by token.

What has to be known of the output is only how much of the marker its end is (Knuth, Morris and Pratt):

    output  ... and so. </thi|nk>{"a"       matched = 5 at the bar; the next token completes `</think>`,
            free text   ^^^^^ ^^^           and what it holds behind that is the first of the constrained text
"""

from __future__ import annotations

from collections.abc import Sequence


class Marker:
    """
    Args:
        text: the marker, not empty.
        token_texts: text of every token.
    """

    def __init__(self, text: bytes, token_texts: Sequence[bytes]) -> None:
        self.text = text
        ends = {text[start:] for start in range(len(text))}
        self._mixed: dict[int, list[tuple[int, bytes]]] = {}  # matched -> tokens that complete the marker, and what is behind it
        self._candidates = [
            (token, own)
            for token, own in enumerate(token_texts)
            if text in own or (own[:1] in text and any(len(own) > len(end) and own.startswith(end) for end in ends))
        ]

    def advance(self, matched: int, text: bytes) -> tuple[int, bytes | None]:
        """
        Args:
            matched: how many bytes of the marker the output ends with, not all of them.
            text: what comes next.

        Returns:
            The same for the output with `text`; and once the marker is complete, what stands behind it.
        """
        found = (self.text[:matched] + text).find(self.text)
        if found >= 0:
            return 0, (self.text[:matched] + text)[found + len(self.text) :]
        tail = self.text[:matched] + text
        longest = min(len(tail), len(self.text) - 1)
        return next((size for size in range(longest, 0, -1) if tail.endswith(self.text[:size])), 0), None

    def mixed(self, matched: int) -> list[tuple[int, bytes]]:
        """Tokens that complete the marker and go on behind it, with what they hold there."""
        if matched not in self._mixed:
            self._mixed[matched] = [(token, rest) for token, own in self._candidates if (rest := self.advance(matched, own)[1])]
        return self._mixed[matched]
