"""Traces of real traffic: when each request came, how long its prompt was, and how much was generated.

Three formats, told apart by their first line:

    Azure CSV         TIMESTAMP,ContextTokens,GeneratedTokens          (Azure LLM inference traces, code and conversation)
    Mooncake JSONL    {"timestamp": ms, "input_length", "output_length", "hash_ids": [one per 512 prompt tokens]}
    plain CSV         ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS            (the same with seconds, for traces made by hand)
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from specdec.errors import ConfigError

HASH_BLOCK_TOKENS = 512
"""Prompt tokens behind one hash of a Mooncake trace."""
MOST_TOKENS = 10_000_000
"""Tokens of a prompt or an output: more is a mistake, and would only fill the memory."""
_MOST_S = 1e11  # some thousand years, since a time stamp may be one
_SECOND_DIGITS = 26  # of an Azure timestamp; the seventh decimal is beyond datetime


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: seconds after the first request.
        num_prompt: prompt tokens, at least 1.
        num_output: tokens that were generated, at least 1.
        blocks: names of the prompt's blocks of `HASH_BLOCK_TOKENS`; prompts agree as far as these do. Empty: with no other.
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()

    def prompt(self, unique: int) -> list[int]:
        """Token ids: equal where block names are, and else unlike every other prompt's.

        Args:
            unique: a number that no other request of the trace has.
        """
        if not self.blocks:
            return [unique] + [0] * (self.num_prompt - 1)
        tokens: list[int] = []
        for block in self.blocks:
            tokens += [block] * HASH_BLOCK_TOKENS
        return tokens[: self.num_prompt]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace in order of arrival, the first one at 0 s.

    Raises:
        ConfigError: the file cannot be read, its format is unknown, or a line of it is wrong; the line is named.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"cannot read the trace {path}: there is no such file")
        with path.open(encoding="utf-8") as lines:
            requests = list(_take(_parser(path, lines.readline())(lines), limit, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not requests:
        raise ConfigError(f"the trace {path} holds no request")
    requests.sort(key=lambda request: request.arrival_s)
    return [replace(request, arrival_s=request.arrival_s - requests[0].arrival_s) for request in requests]


def speed_up(requests: Sequence[TraceRequest], load: float) -> list[TraceRequest]:
    """The same requests, arriving `load` times as fast."""
    return [replace(request, arrival_s=request.arrival_s / load) for request in requests]


def _parser(path: Path, first: str) -> Callable[[Iterable[str]], Iterator[TraceRequest]]:
    """The parser for what follows the first line."""
    if first.startswith("TIMESTAMP,ContextTokens,GeneratedTokens"):
        return lambda lines: (_azure(row) for row in csv.reader(lines))
    if first.startswith("ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS"):
        return lambda lines: (TraceRequest(float(row[0]), int(row[1]), int(row[2])) for row in csv.reader(lines))
    if first.lstrip().startswith("{"):
        return lambda lines: (_mooncake(line) for line in _with_first(first, lines))
    raise ConfigError(
        f"the trace {path} has an unknown format: wanted a first line of TIMESTAMP,ContextTokens,GeneratedTokens (Azure), "
        "ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS, or JSON lines with timestamp, input_length, output_length (Mooncake), "
        f"got {first.strip()[:80]!r}"
    )


def _with_first(first: str, lines: Iterable[str]) -> Iterator[str]:
    yield first
    yield from lines


def _take(requests: Iterator[TraceRequest], limit: int | None, path: Path) -> Iterator[TraceRequest]:
    """The first requests, each checked."""
    number = 0
    while limit is None or number < limit:
        number += 1
        try:
            request = next(requests)
        except StopIteration:
            return
        except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
            raise ConfigError(f"request {number} of the trace {path} is wrong: {type(error).__name__} {error}") from error
        if not (1 <= request.num_prompt <= MOST_TOKENS and 1 <= request.num_output <= MOST_TOKENS):
            lengths = f"{_short(request.num_prompt)} prompt and {_short(request.num_output)} generated tokens"
            raise ConfigError(f"request {number} of the trace {path} needs 1 to {MOST_TOKENS} of each, got {lengths}")
        if not -_MOST_S <= request.arrival_s <= _MOST_S:
            raise ConfigError(f"request {number} of the trace {path} must come within {_MOST_S:g} s, got {request.arrival_s}")
        yield request


def _short(number: int) -> str:
    return str(number) if -(10**12) < number < 10**12 else f"a number of {len(str(abs(number)))} digits"


def _azure(row: Sequence[str]) -> TraceRequest:
    return TraceRequest(datetime.fromisoformat(row[0][:_SECOND_DIGITS]).timestamp(), int(row[1]), int(row[2]))


def _mooncake(line: str) -> TraceRequest:
    values = json.loads(line)
    length, blocks = int(values["input_length"]), tuple(int(block) for block in values.get("hash_ids", ()))
    if blocks and len(blocks) * HASH_BLOCK_TOKENS < length:
        raise ValueError(f"{length} prompt tokens need {-(-length // HASH_BLOCK_TOKENS)} hash_ids, got {len(blocks)}")
    return TraceRequest(values["timestamp"] / 1000, length, int(values["output_length"]), blocks)
