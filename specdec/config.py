"""EngineConfig: every option of the engine, in one frozen value, checked before weights load."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from specdec.drafter_spec import parse_drafter_spec
from specdec.errors import ConfigError
from specdec.request import VERIFY_RULES

DTYPES = ("auto", "int8", "int4", "int4-all", "float32", "bfloat16")
DRAFT_BUDGETS = ("auto", "all")
DEMO_MODEL = "demo"
MAX_TIMEOUT_S = 86400.0
_COUNTS = (
    *("max_model_len", "max_num_seqs", "max_batch_tokens", "prefill_chunk", "page_size", "num_pages", "max_queue"),
    "grammar_max_bytes",
)
_TYPES: Mapping[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float), "None": (type(None),)}


@dataclass(frozen=True)
class EngineConfig:
    """Every option of the engine.

    Attributes:
        model: a hub id, a folder with safetensors, a `.gguf` file, or `demo` for the demo model.
        dtype: of the weights: `int8`, `int4` (the 4-bit blocks of a GGUF file as they are, all else int8), `int4-all` (4 bits for
            every linear layer), `bfloat16`, `float32`, or `auto`, the fastest here: on a CPU made for it int4 for such a file and
            else int8, elsewhere a float type that suits checkpoint and device. With auto, draft models run in int4-all there.
        device: `auto` or `cpu`.
        threads: that compute on a CPU; None takes torch's choice, which OMP_NUM_THREADS sets. Holds for the whole process.
        drafter: default drafter spec; requests may name another that needs no loading.
        draft_budget: how much is drafted and verified: `auto` spends what is predicted to pay, step by step; `all` everything
            within the drafter's limit; a number so many nodes per request and step.
        warm_up_s: seconds that measuring the costs of steps may take, at the first start with a model on a machine; 0 for none.
        target_itl_ms: steps are kept shorter than this, by smaller prompt chunks and drafts; a request may set its own.
        target_ttft_ms: requests whose first token is predicted to come later than this are refused; a request may set its own.
        fair_share: serve those users first that were served least (the `user` of a request), within a priority.
        verify_rule: how drafts are verified: `coupled` makes the output independent of the drafter; `rejection` and
            `traversal` keep its law only, and accept more of what a sampling draft model proposes at high temperature.
        seed: seeds the seeds of requests that bring none.
        max_model_len: the most tokens of prompt and output together; None takes the model's own limit.
        max_num_seqs: requests that run at once; more wait.
        max_batch_tokens: token rows in one forward, prefill chunks included.
        prefill_chunk: the most prompt tokens that one request forwards in one step; None is `max_batch_tokens`.
        page_size: tokens in a KV page.
        num_pages: KV pages; None sizes the pool from `kv_memory_gb`.
        kv_memory_gb: memory for the KV pools of target and drafters; None takes what `max_num_seqs` requests of
            full length need, at most a quarter of the free memory.
        swap_gb: host memory for the KV of requests that are preempted while the pool is full; they take it from there when that is
            predicted to be faster than to compute it again. 0 for none. On a CPU `kv_memory_gb` makes better use of the memory.
        prefix_cache: keep the KV of finished requests for prompts that start alike.
        draft_timeout_s: a user's drafter that takes longer than this in one step is switched off.
        max_queue: requests that may wait; more are refused.
        grammar_max_bytes: constraints (JSON schemas, regular expressions, grammars) larger than this are refused.
        grammar_timeout_s: so are constraints that take longer than this to compile.
        check_invariants: check the books after every step; slow, for tests.
    """

    model: str = DEMO_MODEL
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    drafter: str = "off"
    draft_budget: str | int = "auto"
    warm_up_s: float = 10.0
    target_itl_ms: float | None = None
    target_ttft_ms: float | None = None
    fair_share: bool = False
    verify_rule: str = "coupled"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_batch_tokens: int = 512
    prefill_chunk: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_memory_gb: float | None = None
    swap_gb: float = 0.0
    prefix_cache: bool = True
    draft_timeout_s: float = 10.0
    max_queue: int = 1024
    grammar_max_bytes: int = 256 * 1024
    grammar_timeout_s: float = 10.0
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            _of_type(field.name, getattr(self, field.name), str(field.type))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("verify_rule", self.verify_rule, VERIFY_RULES)
        object.__setattr__(self, "draft_budget", _draft_budget(self.draft_budget))
        _between("warm_up_s", self.warm_up_s, 0.0, MAX_TIMEOUT_S)
        for name in ("target_itl_ms", "target_ttft_ms"):
            _between(name, getattr(self, name), 1e-3, MAX_TIMEOUT_S * 1e3)
        _between("seed", self.seed, 0, 2**64 - 1)
        _between("threads", self.threads, 1, 1024)
        for name in _COUNTS:
            _between(name, getattr(self, name), 1, 2**31 - 1)
        for name in ("draft_timeout_s", "grammar_timeout_s"):
            _between(name, getattr(self, name), 1e-3, MAX_TIMEOUT_S)
        if self.kv_memory_gb is not None and not self.kv_memory_gb > 0:
            raise ConfigError(f"kv_memory_gb must be more than 0, got {self.kv_memory_gb}")
        if self.kv_memory_gb is not None and self.num_pages is not None:
            raise ConfigError("kv_memory_gb and num_pages both size the KV pool: give one of them")
        _between("swap_gb", self.swap_gb, 0.0, 2**20)
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens must be at least max_num_seqs, so that every running request gets a row: "
                f"got {self.max_batch_tokens} and {self.max_num_seqs}"
            )
        parse_drafter_spec(self.drafter)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:  # option values, checked in __post_init__
        """Builds a config from a mapping. Raises ConfigError for an unknown key, with the nearest known one."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown engine option {name!r}{hint} Known: {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All options as JSON values."""
        return asdict(self)


def _draft_budget(value: str | int) -> str | int:
    """A number may come as a text, from a command line."""
    if value in DRAFT_BUDGETS:
        return value
    number = int(value) if str(value).isascii() and str(value).isdecimal() else 0
    if not 1 <= number <= 4096:
        raise ConfigError(f"draft_budget must be {' or '.join(DRAFT_BUDGETS)}, or a number of nodes from 1 to 4096, got {value!r}")
    return number


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _between(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, got {value}")


def _of_type(name: str, value: object, annotation: str) -> None:
    """Checks a value against its field's annotation, such as `int | None`; a bool is no number here."""
    kinds = annotation.split(" | ")
    allowed = tuple(kind for word in kinds for kind in _TYPES[word])
    if not isinstance(value, allowed) or (isinstance(value, bool) and "bool" not in kinds):
        raise ConfigError(f"{name} must be {' or '.join(kinds)}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value!r}")
