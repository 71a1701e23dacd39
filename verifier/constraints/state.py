"""One constrained request: which tokens are legal at every node of its draft, and when its output is complete.

Only committed tokens move the state on. A draft is followed node by node, and every step into it is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.request import Request
from specdec.tree import DraftTree
from specdec.verifier.constraints.compiler import Grammar
from specdec.verifier.constraints.marker import Marker
from specdec.verifier.constraints.vocabulary import Mask

Masks = NDArray[np.uint32]  # one Mask per row

NO_WAY_ON = "the constraint cannot be met: no token of the vocabulary continues the output legally here"


@dataclass(frozen=True)
class NodeMasks:
    """What may follow each node of a draft.

    Attributes:
        words: uint32 [nodes + 1, words]: the root's mask, then one per node; all bits where nothing is ruled out or the node
            cannot be reached. None where that holds for all.
        failures: (node, reason) of nodes after which no token can be chosen; -1 is the root.
    """

    words: Masks | None
    failures: tuple[tuple[int, str], ...] = ()


class ConstraintState:
    """
    Args:
        grammar: what the output must match.
        marker: the text behind which it must; None for the start.
        request: the tokens that end it are legal where the grammar is complete, and nothing is said of what follows them.
    """

    def __init__(self, grammar: Grammar, marker: Marker | None, request: Request) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._marker = marker
        self._matched: int | None = None if marker is None else 0  # None: the grammar rules
        self._matcher = grammar.matcher()
        self._consumed: list[int] = []  # what the matcher has been given, to make it anew
        self._end_ids = request.eos_token_ids | frozenset(request.params.stop_token_ids)
        self._allowed: Mask = self._vocabulary.all & ~self._vocabulary.mask_of(self._vocabulary.end_ids - self._end_ids)
        self._root: Mask | None = None  # the mask after the committed tokens, once it is known
        self._failure: str | None = None

    def push(self, token: int) -> bool:
        """Moves on by a committed token; whether the output is complete: it matches, and nothing more can follow."""
        if token in self._end_ids or self._failure is not None:
            return False
        self._root = None
        tokens = [token]
        if self._matched is not None:
            assert self._marker is not None
            self._matched, rest = self._marker.advance(self._matched, self._vocabulary.bytes_of(token))
            if rest is None:
                return False
            self._matched = None
            tokens = self._vocabulary.tokenize(rest)
        self._consumed += tokens
        if self._matcher.try_consume_tokens(tokens) != len(tokens):
            self._failure = f"the constraint's parser failed: {self._matcher.get_error() or 'a token was illegal'}"
            return False
        return self._is_complete()

    def masks(self, tree: DraftTree) -> NodeMasks:
        """What may follow the committed tokens and every node of `tree`."""
        if self._failure is not None:
            return NodeMasks(None, ((-1, self._failure),))
        if self._matched is not None and not len(tree) and not self._illegal(self._matched):
            return NodeMasks(None)
        return _Walk(self, tree).run()

    def forced(self, limit: int) -> list[int]:
        """The tokens that must come next, at most `limit`; none where there is a choice."""
        if self._matched is not None or self._failure is not None:
            return []
        tokens = self._matcher.compute_ff_tokens()[:limit]
        return tokens if not self._matcher.is_error() else []

    def _is_complete(self) -> bool:
        if self._matcher.is_stopped():
            return not self._matcher.is_error()
        if not self._matcher.is_accepting():
            return False
        mask = self._root_mask()
        return mask is not None and not (mask & self._vocabulary.no_end).any()

    def _root_mask(self) -> Mask | None:
        """The mask after the committed tokens; None where the parser failed, which is then this state's failure."""
        if self._root is None:
            mask = np.empty(self._vocabulary.num_words, dtype=np.uint32)
            error = self._compute(mask)
            if error is not None:
                self._failure = error
                return None
            self._root = mask
        return self._root

    def _compute(self, mask: Mask) -> str | None:
        """Fills in the matcher's mask; the reason where it cannot tell."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            return f"the constraint's parser gave up: {self._matcher.get_error()}"
        mask &= self._allowed
        return None

    def _illegal(self, matched: int) -> list[int]:
        """Tokens that complete the marker and go on behind it as the grammar does not allow."""
        assert self._marker is not None
        return [token for token, rest in self._marker.mixed(matched) if not self._grammar.begins_with(rest)]

    def _renew(self) -> None:
        """A matcher in an error state never leaves it; a new one is led to the committed tokens."""
        self._matcher = self._grammar.matcher()
        if self._matcher.try_consume_tokens(self._consumed) != len(self._consumed):
            self._failure = f"the constraint's parser failed: {self._matcher.get_error()}"


class _Walk:
    """Depth first through a draft, with the matcher, and back."""

    def __init__(self, state: ConstraintState, tree: DraftTree) -> None:
        self._state = state
        self._tokens: list[int] = tree.tokens.tolist()
        self._children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
        for node, parent in enumerate(tree.parents.tolist()):
            self._children[parent + 1].append(node)
        self._words = np.tile(state._vocabulary.all, (len(tree) + 1, 1))
        self._failures: list[tuple[int, str]] = []

    def run(self) -> NodeMasks:
        state = self._state
        # (node, bytes of the marker matched there, tokens that the matcher consumes on entering); None for the way back
        stack: list[tuple[int | None, int | None, Sequence[int]]] = [(-1, state._matched, ())]
        while stack:
            node, matched, tokens = stack.pop()
            if node is None:
                state._matcher.rollback(len(tokens))
                continue
            if tokens:
                consumed = state._matcher.try_consume_tokens(list(tokens))
                if consumed != len(tokens):  # reachable for a token that holds more than the marker, else the mask has told
                    state._matcher.rollback(consumed)
                    continue
                stack.append((None, None, tokens))
            error = self._ruled(node) if matched is None else None
            if matched is not None:
                self._free(node, matched)
            if error is not None:
                return self._broken(node, error, [n for n, _, _ in stack if n is not None])
            stack += self._entered(node, matched)
        return NodeMasks(self._words, tuple(self._failures))

    def _free(self, node: int, matched: int) -> None:
        illegal = self._state._illegal(matched)
        if illegal:
            self._words[node + 1] &= ~self._state._vocabulary.mask_of(illegal)

    def _ruled(self, node: int) -> str | None:
        """Fills in the mask of a node; the reason where the parser cannot tell."""
        state, row = self._state, self._words[node + 1]
        if node < 0:
            mask = state._root_mask()
            if mask is None:
                return state._failure
            row[:] = mask
        elif state._matcher.is_stopped() and not state._matcher.is_error():
            self._children[node + 1].clear()
            return None  # complete: the request ends with this node, and whatever is chosen after it is dropped
        else:
            error = state._compute(row)
            if error is not None:
                return error
        if not row.any():
            self._failures.append((node, NO_WAY_ON))
        return None

    def _entered(self, node: int, matched: int | None) -> list[tuple[int | None, int | None, Sequence[int]]]:
        """The children of a node that can be reached and do not end the request."""
        state = self._state
        entered: list[tuple[int | None, int | None, Sequence[int]]] = []
        for child in self._children[node + 1]:
            token = self._tokens[child]
            legal = self._words[node + 1, token >> 5] >> np.uint32(token & 31) & np.uint32(1)
            if not legal or token in state._end_ids:
                continue
            if matched is None:
                entered.append((child, None, (token,)))
                continue
            assert state._marker is not None
            size, rest = state._marker.advance(matched, state._vocabulary.bytes_of(token))
            entered.append((child, size, ()) if rest is None else (child, None, state._vocabulary.tokenize(rest)))
        return entered

    def _broken(self, node: int, error: str, waiting: Sequence[int]) -> NodeMasks:
        """The parser gave up at a node: nothing is chosen after it, nor after those that were not looked at."""
        self._failures.append((node, error))
        unseen = [*waiting]
        while unseen:
            self._failures.append((unseen[-1], error))
            unseen += self._children[unseen.pop() + 1]
        if node >= 0:
            self._state._renew()
        return NodeMasks(self._words, tuple(self._failures))
