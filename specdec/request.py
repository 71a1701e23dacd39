"""Requests and sampling parameters. A Request is the one mutable value that crosses the seams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from specdec.errors import RequestError

MAX_SEED = 2**64


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

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        integer = {"max_tokens": self.max_tokens, "top_k": self.top_k, "seed": self.seed, "n": self.n}
        for name, value in integer.items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
                raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
        self._require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1, or None")
        self._require(self.temperature >= 0, "temperature", "0 (greedy) or more")
        self._require(self.top_k >= 0, "top_k", "0 (off) or more")
        self._require(0 < self.top_p <= 1, "top_p", "more than 0 and at most 1")
        self._require(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        self._require(self.seed is None or 0 <= self.seed < MAX_SEED, "seed", "at least 0 and less than 2**64")
        self._require(1 <= self.n <= 128, "n", "between 1 and 128")
        self._require(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")
        ids_ok = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in self.stop_token_ids)
        self._require(ids_ok, "stop_token_ids", "token ids of 0 or more")

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise RequestError(f"{name} must be {wanted}, got {getattr(self, name)!r}", param=name)

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


@dataclass
class RequestStats:
    """What a request cost and what its drafts brought. Words as in docs/architecture.md.

    `verifies` counts forwards of this request as a decoding row; the forward that ends its prefill is none of them.
    `emitted` counts the tokens that those verifies delivered, so the first token is not in it. `queue_s` is the wait before
    the first row, `first_token_s` the time from arrival to the first token (None before it).
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

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verify; 1.0 before the first verify."""
        return self.emitted / self.verifies if self.verifies else 1.0

    @property
    def wasted(self) -> int:
        return self.drafted - self.accepted


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
        priority: lower runs first and is preempted last.
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
    priority: int = 0
    parent: str | None = None
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
