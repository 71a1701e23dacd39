"""Requests and sampling parameters. A Request is the one mutable value that crosses the seams."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from specdec.errors import RequestError

MAX_SEED = 2**64
MAX_LOGPROBS = 100
VERIFY_RULES = ("coupled", "rejection", "traversal")


LogitsProcessor = Callable[[Sequence[int], Any], Any]  # (ids, torch.Tensor) -> torch.Tensor; this module must not import torch
CONSTRAINT_KINDS = ("json_schema", "json_object", "regex", "choice", "ebnf", "lark")


@dataclass(frozen=True)
class Constraint:
    """What an output must match, from its start or after a marker.

    Attributes:
        kind: one of CONSTRAINT_KINDS.
        text: the JSON schema, regular expression or grammar; for `choice` a JSON list of texts, for `json_object` empty.
        after: the constraint begins behind the first occurrence of this text in the output, such as `</think>`; empty
            for the start.
    """

    kind: str
    text: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINT_KINDS:
            raise RequestError(f"constraint kind must be one of {', '.join(CONSTRAINT_KINDS)}, got {self.kind!r}", param="constraint")
        if not self.text and self.kind != "json_object":
            raise RequestError(f"a constraint of kind {self.kind} needs a text, got none", param="constraint")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request.

    Attributes:
        max_tokens: the most tokens to emit; None means up to the context limit.
        temperature: 0 is greedy (argmax, lowest id on ties).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: then keep the smallest set whose probability reaches this; 1 keeps all.
        min_p: then drop tokens less probable than this fraction of the most probable one; 0 drops none.
        seed: 0 <= seed < 2**64; None draws one from the engine's seed. The ids of a request depend on its prompt,
            these parameters and the seed, and on nothing else.
        n: how many choices to return; each has a seed derived from `seed`.
        stop: texts that end a choice; the text returned ends before them.
        stop_token_ids: ids that end a choice, beside the model's own end tokens. They are in the ids, not in the text.
        ignore_eos: go on past the model's end tokens (`stop_token_ids` still end a choice).
        typical_p: keep the locally typical set of this mass (Meister et al. 2023); 1 keeps all.
        repetition_penalty: divide positive logits of tokens seen in prompt or output by this, multiply negative ones.
        presence_penalty: subtract this from the logits of tokens seen in the output.
        frequency_penalty: subtract this, times how often a token was seen in the output.
        logit_bias: (token id, addend) pairs; a mapping is taken too.
        bad_words: texts or id sequences whose last token is never emitted after the others.
        allowed_token_ids: only these are emitted; empty allows all.
        min_tokens: neither end tokens nor stop ids are emitted before so many tokens.
        best_of: generate so many choices and return the `n` of highest mean logprob; None is `n`.
        logprobs: log-probabilities of emitted tokens, and of so many best ones beside; None for none.
        prompt_logprobs: the same for prompt tokens from the second on.
        verify_rule: how drafts of this request are verified; None takes the engine's.
        constraint: what the output must match.
        logits_processors: functions (token ids so far, logits float32 [vocabulary]) -> logits, called for every node
            with its own history, after the penalties and before temperature. From Python only.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    verify_rule: str | None = None
    constraint: Constraint | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "logits_processors", "logit_bias", "bad_words"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        integers = ("max_tokens", "top_k", "seed", "n", "min_tokens", "best_of", "logprobs", "prompt_logprobs")
        integer = {name: getattr(self, name) for name in integers}
        for name, value in integer.items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
            self._require(name == "seed" or value is None or value < 2**31, name, "less than 2**31")
        for name in ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not _is_finite(value):
                raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
        self._require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1, or None")
        self._require(self.temperature >= 0, "temperature", "0 (greedy) or more")
        self._require(self.top_k >= 0, "top_k", "0 (off) or more")
        self._require(0 < self.top_p <= 1, "top_p", "more than 0 and at most 1")
        self._require(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        self._require(self.seed is None or 0 <= self.seed < MAX_SEED, "seed", "at least 0 and less than 2**64")
        self._require(1 <= self.n <= 128, "n", "between 1 and 128")
        self._require(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")
        self._require(0 < self.typical_p <= 1, "typical_p", "more than 0 and at most 1")
        self._require(self.repetition_penalty > 0, "repetition_penalty", "more than 0")
        self._require(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        self._require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        self._require(self.min_tokens >= 0, "min_tokens", "0 or more")
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        self._require(fits, "min_tokens", f"at most max_tokens, {self.max_tokens}")
        self._require(self.best_of is None or self.n <= self.best_of <= 128, "best_of", f"between n, {self.n}, and 128")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}, or None")
        self._require(all(map(_is_bias, self.logit_bias)), "logit_bias", "pairs of a token id and a finite number or -inf")
        self._require(all(map(_is_id, self.allowed_token_ids)), "allowed_token_ids", "token ids of 0 or more")
        self._require(all(map(_is_word, self.bad_words)), "bad_words", "non-empty texts or non-empty sequences of token ids")
        rules_ok = self.verify_rule is None or self.verify_rule in VERIFY_RULES
        self._require(rules_ok, "verify_rule", f"one of {', '.join(VERIFY_RULES)}, or None")
        ids_ok = all(map(_is_id, self.stop_token_ids))
        self._require(ids_ok, "stop_token_ids", "token ids of 0 or more")
        self._require(all(map(callable, self.logits_processors)), "logits_processors", "functions (ids, logits) -> logits")
        constraint_ok = self.constraint is None or isinstance(self.constraint, Constraint)
        self._require(constraint_ok, "constraint", "a Constraint, or None")

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise RequestError(f"{name} must be {wanted}, got {getattr(self, name)!r}", param=name)

    @property
    def num_choices(self) -> int:
        """Choices to generate, of which `n` are returned."""
        return self.best_of or self.n

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:  # JSON values, checked in __post_init__
        """Builds parameters from a mapping. Raises RequestError for an unknown key."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {name!r}; known: {', '.join(sorted(known))}", param=name)
        return cls(**values)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:  # whatever a user gave; the elements are checked afterwards
    """The value of a field that holds several, as a tuple of tuples where its elements are pairs or sequences."""
    if isinstance(value, str):
        value = (value,)
    try:
        items = value.items() if isinstance(value, Mapping) else value
        return tuple(tuple(item) if isinstance(item, (list, tuple)) else item for item in items)
    except TypeError:
        raise RequestError(f"{name} must be a sequence, got {value!r}", param=name) from None


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of a float
        return False


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_bias(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2 or not _is_id(pair[0]):
        return False
    addend = pair[1]
    return isinstance(addend, (int, float)) and not isinstance(addend, bool) and (_is_finite(addend) or addend == -math.inf)


def _is_word(word: object) -> bool:
    return bool(word) and (isinstance(word, str) or (isinstance(word, tuple) and all(map(_is_id, word))))


@dataclass
class RequestStats:
    """What a request cost and what its drafts brought. Words as in docs/architecture.md.

    `verifies` counts forwards of this request as a decoding row; the forward that ends its prefill is none of them.
    `emitted` counts the tokens that those verifies delivered, so the first token is not in it. `queue_s` is the wait before
    the first row, `first_token_s` the time from arrival to the first token (None before it). `draft_by` is `draft_s` by drafter,
    `decode_s` all seconds of those verifies with their drafts, and `off_s` what the cost model says that the same tokens would
    have taken without drafts.
    """

    drafted: int = 0
    accepted: int = 0
    verifies: int = 0
    emitted: int = 0
    prefill_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    prefill_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0
    host_s: float = 0.0
    queue_s: float = 0.0
    first_token_s: float | None = None
    draft_by: dict[str, float] = field(default_factory=dict)
    decode_s: float = 0.0
    off_s: float = 0.0

    @property
    def speedup(self) -> float:
        """How many times faster it decoded than it is estimated to have done without drafts; 1.0 before the first verify."""
        return self.off_s / self.decode_s if self.off_s > 0 and self.decode_s > 0 else 1.0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verify; 1.0 before the first verify."""
        return self.emitted / self.verifies if self.verifies else 1.0

    @property
    def wasted(self) -> int:
        return self.drafted - self.accepted


@dataclass(frozen=True)
class Scheduling:
    """How a request is to be scheduled. Nothing of it changes what it says, only when.

    Attributes:
        priority: lower runs first.
        max_draft: the most draft nodes per step, 0 for none; None takes the drafter's limit.
        target_itl_ms: steps are kept shorter than this while it runs; None takes the engine's.
        target_ttft_ms: it is refused where its first token is predicted to come later; None takes the engine's.
        user: whose share of the engine it takes, where that is shared fairly.
    """

    priority: int = 0
    max_draft: int | None = None
    target_itl_ms: float | None = None
    target_ttft_ms: float | None = None
    user: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise RequestError(f"priority must be an integer, got {self.priority!r}", param="priority")
        if self.max_draft is not None and not _is_id(self.max_draft):
            raise RequestError(f"max_draft must be an integer from 0 to {2**31 - 1}, or None, got {self.max_draft!r}", param="max_draft")
        for name in ("target_itl_ms", "target_ttft_ms"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)
            if value is not None and not (is_number and value > 0):
                raise RequestError(f"{name} must be a positive number of milliseconds, or None, got {value!r}", param=name)
        if not isinstance(self.user, str):
            raise RequestError(f"user must be a text, got {self.user!r}", param="user")


DEFAULT_SCHEDULING = Scheduling()


@dataclass(eq=False)
class Request:
    """One choice to generate: its prompt, its parameters and all tokens committed so far.

    Attributes:
        id: unique within the engine.
        tokens: prompt, then every emitted token. The only record of them; everything else is derived.
        num_prompt: how many of `tokens` are prompt.
        params: sampling parameters; `params.n` is already expanded, a Request is one choice.
        seed: the resolved 64-bit seed of this choice.
        drafter: drafter spec string; `off` for none.
        max_length: `len(tokens)` never exceeds this: prompt + max_tokens, capped by context and pool.
        eos_token_ids: the model's end tokens, empty under `ignore_eos`.
        prediction: predicted output ids, for the `prediction` drafter.
        bad_words: `params.bad_words` as id sequences.
        num_scored: prompt tokens whose logprobs were told; the first has none.
        priority: lower runs first and is preempted last.
        max_draft: the most draft nodes per step; None takes the drafter's limit.
        target_itl_s: seconds that should pass between its tokens at most.
        target_ttft_s: seconds from its arrival to its first token at most.
        user: whose share of a fair server it takes.
        arrival_s: when it came, by the engine's clock.
        parent: id of the sibling whose prompt KV this choice shares (n > 1), until it has run.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    max_length: int
    drafter: str = "off"
    eos_token_ids: frozenset[int] = frozenset()
    prediction: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_scored: int = 1
    priority: int = 0
    parent: str | None = None
    max_draft: int | None = None
    target_itl_s: float | None = None
    target_ttft_s: float | None = None
    user: str = ""
    arrival_s: float = 0.0
    finish_reason: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[self.num_prompt :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_length - len(self.tokens)
