"""Specs are checked before anything is built, and what is wrong is named."""

import gc
import sys
import types

import pytest

from specdec.config import EngineConfig
from specdec.drafter_spec import parse_drafter_spec
from specdec.drafters import registry
from specdec.drafters.base import Drafter
from specdec.drafters.function import FunctionDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.errors import ConfigError, DrafterError
from specdec.llm import LLM
from specdec.testing import Empty, make_context, make_row, write_tiny_checkpoint
from specdec.tree import EMPTY


class Custom(Empty):
    def __init__(self, context, depth: int = 3, name: str = "x", rate: float = 0.5, wide: bool = False) -> None:
        self.values = (depth, name, rate, wide)
        self.context = context


class Broken(Empty):
    def __init__(self) -> None:
        sys.exit("nothing works")


class NotADrafter:
    def propose(self, rows):
        return [EMPTY for _ in rows]


def repeat_last(tokens, limit, times: int = 99):
    return [tokens[-1]] * min(limit, times)


def factory(context, value: int):
    return lambda tokens, limit: [value] * limit


@pytest.fixture
def module(monkeypatch):
    here = types.ModuleType("my_drafters")
    for item in (Custom, Broken, NotADrafter, repeat_last, factory):
        setattr(here, item.__name__, item)
    here.number = 3
    monkeypatch.setitem(sys.modules, "my_drafters", here)


@pytest.fixture
def names():
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def build(text):
    (part,) = parse_drafter_spec(text)
    return registry.create_drafter(part, make_context())


@pytest.mark.parametrize(
    "text", ["off", "ngram", "ngram(min=2,max=5)", "prediction(limit=4)", "ngram+prediction", "model:org/name(depth=2)"]
)
def test_good_specs_pass(text):
    registry.check_spec(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ngrm", ["'ngrm'", "did you mean 'ngram'", "prediction"]),
        ("ngram(mim=2)", ["'mim'", "did you mean 'min'", "limit, max, min"]),
        ("ngram(min=two)", ["'min'", "int", "'two'"]),
        ("ngram(min=true)", ["'min'", "int", "True"]),
        ("ngram(min=2.5)", ["'min'", "int", "2.5"]),
        ("ngram(min=5,max=2)", ["1 <= min <= max", "min=5", "max=2"]),
        ("ngram(limit=0)", ["limit", "between 1 and 256", "0"]),
        ("ngram:x", ["'ngram'", "no target"]),
        ("prediction(limit=1000)", ["limit", "1000"]),
        ("model", ["'model'", "needs a target", "model:TARGET"]),
        ("model:org/name(depth=0)", ["depth", "between 1 and 64"]),
        ("model:/no/such/file.gguf", ["no such model", "/no/such/file.gguf"]),
        ("no_such_module:Thing", ["no Python module", "'no_such_module'", "ngram"]),
        ("modle:path", ["did you mean 'model'"]),
        ("my_drafters:Custm", ["no 'Custm'", "did you mean 'Custom'"]),
        ("my_drafters:NotADrafter", ["derive from specdec.Drafter", "NotADrafter"]),
        ("my_drafters:number", ["expected a Drafter", "int"]),
        ("my_drafters:factory", ["'value' has no default"]),
        ("my_drafters:Custom(dept=3)", ["'dept'", "did you mean 'depth'"]),
        ("ngram+my_drafters:repeat_last(no=1)", ["'no'", "times"]),
        ("os:getcwd", ["function(tokens, limit)"]),
    ],
)
def test_wrong_specs_name_the_fault_and_what_is_allowed(module, text, words):
    with pytest.raises(ConfigError) as caught:
        registry.check_spec(text)
    for word in words:
        assert word in str(caught.value)


def test_a_module_that_fails_on_import_is_the_specs_fault(tmp_path, monkeypatch):
    (tmp_path / "breaks_on_import.py").write_text("raise ValueError('sorry')")
    (tmp_path / "needs_another.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="ValueError: sorry"):
        registry.check_spec("breaks_on_import:Thing")
    with pytest.raises(ConfigError, match="needs 'surely_not_installed'"):
        registry.check_spec("needs_another:Thing")


def test_built_ins_and_customs_are_built_with_their_options(module):
    assert isinstance(build("ngram(max=3,min=2)"), NgramDrafter)
    assert build("ngram(limit=5)").default_limit == 5
    custom = build("my_drafters:Custom(depth=5,rate=1,name=7)")
    assert custom.values == (5, "7", 1.0, False) and custom.context.vocab_size == 512
    assert isinstance(custom.values[2], float)


def test_functions_are_adapted(module):
    row = make_row([1, 2, 3], limit=4, depth=2)
    drafter = build("my_drafters:repeat_last(times=1)")
    assert isinstance(drafter, FunctionDrafter) and drafter.propose([row])[0].tokens.tolist() == [3]
    assert build("my_drafters:repeat_last").propose([row])[0].tokens.tolist() == [3, 3]
    assert build("my_drafters:factory(value=9)").propose([row])[0].tokens.tolist() == [9, 9]


@pytest.mark.parametrize("result", [["a"], [1.0], [True], [None]])
def test_a_function_must_return_ids(result):
    with pytest.raises(TypeError, match="token ids"):
        FunctionDrafter(lambda tokens, limit: result).propose([make_row([1])])


def test_a_function_may_return_none_or_numpy():
    import numpy as np

    row = make_row([1], limit=2)
    assert len(FunctionDrafter(lambda tokens, limit: None).propose([row])[0]) == 0
    assert FunctionDrafter(lambda tokens, limit: np.array([4, 5, 6])).propose([row])[0].tokens.tolist() == [4, 5]


def test_a_drafter_that_exits_while_it_is_built_is_an_error(module):
    with pytest.raises(DrafterError, match="SystemExit: nothing works"):
        build("my_drafters:Broken")


def test_register_drafter(names):
    registry.register_drafter("mine", Custom)
    registry.check_spec("mine(depth=2)")
    assert build("mine(depth=2)").values[0] == 2
    for taken in ("mine", "ngram"):
        with pytest.raises(ConfigError, match="exists already"):
            registry.register_drafter(taken, Custom)
    for wrong in ("a b", "a+b", "off", "x(y=1)", "a:b"):
        with pytest.raises(ConfigError):
            registry.register_drafter(wrong, Custom)
    registry.unregister("mine")
    with pytest.raises(ConfigError, match="unknown drafter 'mine'"):
        registry.check_spec("mine")


def test_register_instance_takes_drafters_classes_and_functions(names):
    instance = Empty()
    specs = [registry.register_instance(item) for item in (instance, instance, Empty, repeat_last, lambda tokens, limit: [])]
    assert len(set(specs)) == len(specs)
    built = [build(spec) for spec in specs]
    assert built[0] is instance and built[1] is instance and isinstance(built[2], Drafter) and isinstance(built[4], FunctionDrafter)
    with pytest.raises(ConfigError, match="int"):
        registry.register_instance(3)


def test_entry_points_are_drafters(monkeypatch):
    class Point:
        name = "installed"

        def load(self):
            return Custom

    def entry_points(group, name=None):
        assert group == "specdec.drafters"
        return [Point()] if name in (None, "installed") else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    registry.check_spec("installed(depth=4)")
    assert isinstance(build("installed"), Custom) and registry.is_registered("installed")
    assert "installed" in registry.known_drafters()


def test_model_of_names_what_a_part_loads():
    def loaded(spec, **options):
        config = EngineConfig(**options)
        return [registry.model_of(part, config) for part in parse_drafter_spec(spec)]

    assert loaded("ngram+model:a/b(depth=2)") == [None, ("a/b", "auto-draft")]
    assert loaded("model:a/b", model="a/b") == [("a/b", "auto")]
    assert loaded("model:a/b", dtype="bfloat16") == [("a/b", "bfloat16")]
    assert loaded("model:a/b(dtype=int8)", dtype="bfloat16") == [("a/b", "int8")]


def test_a_drafter_given_to_an_llm_is_forgotten_with_it(tmp_path):
    model = write_tiny_checkpoint(tmp_path / "tiny")
    llm = LLM(str(model), drafter=lambda tokens, limit: [], dtype="float32", num_pages=64)
    name = llm.engine.config.drafter
    assert registry.is_registered(name) and name not in registry.known_drafters()
    del llm
    gc.collect()
    assert not registry.is_registered(name)
