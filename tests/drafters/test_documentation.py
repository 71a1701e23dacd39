"""The drafter of docs/drafters.md does what the page says."""

import re
import sys
import types
from pathlib import Path

import pytest

from specdec.drafters.registry import check_spec
from specdec.testing import make_row

PAGE = (Path(__file__).parents[2] / "docs" / "drafters.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def module(monkeypatch):
    here = types.ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", here)
    (source,) = (block for block in BLOCKS if "class Echo" in block)
    exec(source, here.__dict__)
    return here


def test_the_class_of_the_page_works(module):
    check_spec("documented:Echo(width=2)")
    (tree,) = module.Echo(width=2).propose([make_row([1, 2, 3], limit=4)])
    assert sorted(tree.tokens.tolist()) == [2, 3] and tree.parents.tolist() == [-1, -1]


def test_the_page_names_what_there_is():
    import specdec.testing

    (listed,) = re.findall(r"- (`Oracle`.*?):", PAGE)
    for name in re.findall(r"`(\w+)`", listed):
        assert hasattr(specdec.testing, name)
    for spec in re.findall(r"`((?:ngram|prediction)(?:\([\w=,]+\))?)`", PAGE):
        check_spec(spec)
