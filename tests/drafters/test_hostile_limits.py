"""Drafters whose limit or whose exceptions are out of bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from specdec.drafters.base import Drafter, DraftRow
from specdec.drafters.grammar import check_options
from specdec.errors import ConfigError, DrafterError
from specdec.llm import LLM
from specdec.request import SamplingParams
from specdec.testing import write_tiny_checkpoint
from specdec.tree import DraftTree


class _Boundless(Drafter):
    def __init__(self, limit: object) -> None:
        self.default_limit = limit  # type: ignore[assignment]

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        raise AssertionError("never asked")


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class _Mute(Drafter):
    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        raise _Unspeakable


def test_a_limit_that_no_step_can_have_is_refused(tmp_path: Path) -> None:
    model = str(write_tiny_checkpoint(tmp_path))
    for wrong in (10**9, 0, "x", float("inf"), 2.5):
        with pytest.raises(DrafterError, match="default_limit between 1 and 4096"):
            LLM(model, drafter=_Boundless(wrong))
    for limit in (0, 257):
        with pytest.raises(ConfigError, match=f"grammar: limit must be between 1 and 256, got {limit}"):
            check_options(limit)


def test_an_exception_without_words_costs_its_draft_only(tmp_path: Path) -> None:
    llm = LLM(str(write_tiny_checkpoint(tmp_path)), drafter=_Mute(), draft_budget="all")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7]], params)
    (expected,) = llm.generate([[5, 6, 7]], params, drafter="off")
    assert output.token_ids == expected.token_ids and len(output.token_ids) == 8
