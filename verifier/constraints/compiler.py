"""Constraints to grammars that are ready to run: cached, bounded in size and time, from any thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from specdec.errors import RequestError, SpecdecError
from specdec.request import Constraint
from specdec.verifier.constraints.marker import Marker
from specdec.verifier.constraints.sources import grammar_text
from specdec.verifier.constraints.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

MAX_CACHED = 256
"""Grammars kept; the one used longest ago goes first."""
_MAX_AT_ONCE = 4  # compiling threads; one that has been given up runs on until the library's own limits end it

_Key = tuple[str, str]


class Grammar:
    """A compiled grammar; any number of requests run it.

    Attributes:
        vocabulary: what it was compiled for.
    """

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._beginnings: dict[bytes, bool] = {}
        self.vocabulary = vocabulary

    def matcher(self) -> LLMatcher:
        """A matcher that has consumed nothing."""
        with self._lock:
            return self._start.deep_copy()

    def begins_with(self, text: bytes) -> bool:
        """Whether an output may begin with `text`."""
        if text not in self._beginnings:
            tokens = self.vocabulary.tokenize(text)
            self._beginnings[text] = self.matcher().try_consume_tokens(tokens) == len(tokens)
        return self._beginnings[text]


class GrammarCompiler:
    """Compiles constraints for one model. Thread-safe.

    Args:
        tokenizer: the model's; None where it has none, and then every constraint is refused.
        vocab_size: of the model.
        end_ids: the model's end tokens.
        max_bytes: a longer grammar, schema or list of choices is refused.
        timeout_s: so is one that takes longer to compile.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, end_ids: Iterable[int], *, max_bytes: int, timeout_s: float
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._vocabulary: Vocabulary | None = None
        self._grammars: OrderedDict[_Key, Future[Grammar]] = OrderedDict()
        self._markers: OrderedDict[str, Marker] = OrderedDict()
        self._lock = threading.Lock()  # guards the caches
        self._building = threading.Lock()  # guards the vocabulary
        self._slots = threading.BoundedSemaphore(_MAX_AT_ONCE)

    def vocabulary(self) -> Vocabulary:
        """The model's tokens, built by the first call. Raises RequestError where the model cannot be constrained."""
        if self._tokenizer is None:
            raise RequestError("a constraint is about text, and this model comes without a tokenizer", param="constraint")
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._end_ids)
            return self._vocabulary

    def compile(self, constraint: Constraint) -> tuple[Grammar, Marker | None]:
        """The grammar of a constraint, and the marker behind which it begins.

        Raises:
            RequestError: the grammar is invalid, too large, or takes too long.
        """
        size = len(constraint.text.encode("utf-8", "surrogatepass"))
        if size > self._max_bytes:
            raise RequestError(
                f"the constraint has {size} bytes, and grammar_max_bytes allows {self._max_bytes}: make it smaller", param="constraint"
            )
        vocabulary = self.vocabulary()
        key = (constraint.kind, constraint.text)
        with self._lock:
            future = self._grammars.get(key)
            if future is None:
                future = self._grammars[key] = Future()
                threading.Thread(target=self._compile, args=(future, constraint, vocabulary), name="specdec-grammar", daemon=True).start()
                while len(self._grammars) > MAX_CACHED:
                    self._grammars.popitem(last=False)
            self._grammars.move_to_end(key)
        try:
            grammar = future.result(self._timeout_s)
        except TimeoutError:
            raise RequestError(
                f"compiling the constraint takes longer than grammar_timeout_s = {self._timeout_s:g} s: make it simpler", param="constraint"
            ) from None
        except RequestError as error:  # a new one, as the kept one would gather the traceback of every caller
            raise RequestError(str(error), param=error.param) from None
        return grammar, self._marker(constraint.after, vocabulary) if constraint.after else None

    def _marker(self, text: str, vocabulary: Vocabulary) -> Marker:
        with self._lock:
            marker = self._markers.get(text)
            if marker is None:
                marker = self._markers[text] = Marker(text.encode(), vocabulary.texts)
                while len(self._markers) > MAX_CACHED:
                    self._markers.popitem(last=False)
            return marker

    def _compile(self, future: Future[Grammar], constraint: Constraint, vocabulary: Vocabulary) -> None:
        try:
            with self._slots:
                future.set_result(_compiled(constraint, vocabulary))
        except SpecdecError as error:
            future.set_exception(error)
        except Exception as error:  # whatever the library makes of a text is told to the request that brought it
            future.set_exception(RequestError(f"the {constraint.kind} constraint cannot be compiled: {error}", param="constraint"))


def _compiled(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
    """Raises RequestError for an invalid grammar."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.tokens, grammar_text(constraint), log_level=0)
    if matcher.is_error():
        raise RequestError(f"the {constraint.kind} constraint is invalid: {matcher.get_error().strip()}", param="constraint")
    return Grammar(matcher, vocabulary)
