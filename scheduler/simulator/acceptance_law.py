"""Whether a drafted token is accepted: a law given per depth and category, and one fate per request and position.

A node at depth d whose parent was accepted is accepted with probability rate[d]. The uniform number that decides belongs to
the request and the position of the token, so that all policies meet the same luck and their differences are their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import ConfigError


@dataclass(frozen=True)
class Category:
    """Requests whose drafts are accepted alike.

    Attributes:
        name: as the report shows it.
        rates: chance at depth 1, 2, ... given that the parent was accepted; the last one holds for all deeper ones.
        share: of the requests, against the other categories' shares.
    """

    name: str
    rates: tuple[float, ...]
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ConfigError(f"acceptance rates must lie between 0 and 1, at least one, got {list(self.rates)} for {self.name}")
        if not self.share > 0:
            raise ConfigError(f"the share of category {self.name} must be more than 0, got {self.share}")


class Fate:
    """What becomes of one request's drafts.

    Args:
        category: its law.
        luck: a uniform number for each token of the output.
    """

    __slots__ = ("_luck", "_rates", "category")

    def __init__(self, category: Category, luck: Sequence[float]) -> None:
        self.category = category
        self._rates = category.rates
        self._luck = luck

    def accepted(self, position: int, depth: int) -> int:
        """Nodes of a chain of `depth` that are accepted, the first of which would be output token `position`."""
        rates, last, luck = self._rates, len(self._rates) - 1, self._luck
        for place in range(min(depth, len(luck) - position)):
            if luck[position + place] >= rates[place if place < last else last]:
                return place
        return min(depth, len(luck) - position)


class AcceptanceLaw:
    """Gives each request its category and luck, from a seed and the request's number in the trace.

    Args:
        categories: at least one.
        seed: of everything drawn.
    """

    def __init__(self, categories: Sequence[Category], seed: int = 0) -> None:
        if not categories:
            raise ConfigError("an acceptance law needs at least one category, got none")
        self.categories = tuple(categories)
        self._seed = seed
        shares = np.array([category.share for category in categories])
        self._edges = np.cumsum(shares / shares.sum())[:-1]

    def fate(self, number: int, num_output: int) -> Fate:
        """Of the request with that number, which generates so many tokens."""
        random = np.random.default_rng((self._seed, number))
        place = int(np.searchsorted(self._edges, random.random(), side="right"))
        luck: list[float] = random.random(num_output).tolist()
        return Fate(self.categories[place], luck)


def parse_acceptance(text: str) -> list[Category]:
    """`0.6`, rates per depth such as `0.8,0.7,0.5`, or a JSON file of {category: rates or {"rates", "share"}}.

    Raises:
        ConfigError: it is none of these, or a rate is not between 0 and 1.
    """
    if text.endswith(".json"):
        return _read_categories(Path(text))
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            f"acceptance must be a rate such as 0.6, rates per depth such as 0.8,0.7,0.5, or a JSON file (NAME.json), got {text!r}"
        ) from None
    return [Category("all", rates)]


def _read_categories(path: Path) -> list[Category]:
    try:
        values = json.loads(path.read_text("utf-8"))
        return [_category(name, value) for name, value in values.items()]
    except OSError as error:
        raise ConfigError(f"cannot read acceptance rates from {path}: {error.strerror or error}") from error
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f'{path} must hold a JSON object of {{category: rates or {{"rates", "share"}}}}: {error}') from error


def _category(name: str, value: Any) -> Category:  # a JSON value; what is wrong with it is told by what it is used as
    share, rates = (value.get("share", 1.0), value["rates"]) if isinstance(value, Mapping) else (1.0, value)
    return Category(name, tuple(float(rate) for rate in (rates if isinstance(rates, list) else [rates])), float(share))
