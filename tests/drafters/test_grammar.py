"""The drafter of what a constraint forces."""

from dataclasses import replace

import pytest

from specdec.drafters.grammar import GrammarDrafter
from specdec.drafters.registry import check_spec
from specdec.errors import ConfigError
from specdec.request import Constraint, SamplingParams
from specdec.testing import make_context, make_row

CONSTRAINED = SamplingParams(temperature=0, constraint=Constraint("regex", "abc"))


def forced(request_id, limit):
    return {"a": [5, 6, 7, 8], "b": []}[request_id][:limit]


def test_forced_tokens_are_a_chain_within_the_rows_limits():
    drafter = GrammarDrafter(replace(make_context(), forced=forced))
    rows = [
        make_row([1, 2], request_id="a", params=CONSTRAINED),
        make_row([1, 2], request_id="a", params=CONSTRAINED, limit=8, depth=3),
        make_row([1, 2], request_id="a", params=CONSTRAINED, limit=2),
        make_row([1, 2], request_id="b", params=CONSTRAINED),
        make_row([1, 2], request_id="not constrained"),
    ]
    assert [tree.tokens.tolist() for tree in drafter.propose(rows)] == [[5, 6, 7, 8], [5, 6, 7], [5, 6], [], []]
    assert all(tree.is_chain() for tree in drafter.propose(rows))


def test_an_engine_without_constraints_has_nothing_to_force():
    assert [len(tree) for tree in GrammarDrafter(make_context()).propose([make_row([1], params=CONSTRAINED)])] == [0]


def test_options():
    check_spec("grammar(limit=4)+ngram")
    with pytest.raises(ConfigError, match="limit must be between 1 and 256"):
        check_spec("grammar(limit=0)")
