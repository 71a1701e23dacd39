"""Where drafters come from: built-ins, registered ones, the entry-point group `specdec.drafters`, and `module:name`.

Checking a spec loads no model, so that a wrong one is refused before weights load. Nothing here keeps a drafter.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from specdec.drafter_spec import DrafterSpec, parse_drafter_spec
from specdec.drafters.options import Signature, check_options, read_signature
from specdec.errors import ConfigError, DrafterError, SpecdecError

if TYPE_CHECKING:
    from specdec.config import EngineConfig
    from specdec.drafters.base import Drafter, DrafterContext

ENTRY_POINT_GROUP = "specdec.drafters"

Factory = Callable[..., Any]  # called with what its own signature asks for


@dataclass(frozen=True)
class _BuiltIn:
    """Import paths of a built-in drafter. `check` is called with the options, to refuse values that cannot be.

    `loads_model` says that the target after the colon is a model, whose weights and KV need memory.
    """

    factory: str
    check: str
    loads_model: bool = False


_BUILT_INS = {
    "ngram": _BuiltIn("specdec.drafters.ngram:NgramDrafter", "specdec.drafters.ngram:check_options"),
    "grammar": _BuiltIn("specdec.drafters.grammar:GrammarDrafter", "specdec.drafters.grammar:check_options"),
    "prediction": _BuiltIn("specdec.drafters.prediction:PredictionDrafter", "specdec.drafters.prediction:check_options"),
    "model": _BuiltIn("specdec.drafters.draft_model:load_draft_model", "specdec.drafters.draft_model:check_options", loads_model=True),
}
LIGHT = frozenset({"ngram", "prediction", "grammar"})
"""Built-ins that load nothing, so that any request may ask for them."""

_registered: dict[str, Factory] = {}
_unnamed: set[str] = set()  # those among them whose names nobody chose
_numbers = itertools.count(1)


def register_drafter(name: str, factory: Factory) -> None:
    """Makes `name` a drafter in every spec.

    Args:
        name: letters, digits, `_`, `-` and dots, beginning with a letter; not that of a built-in.
        factory: a Drafter class, a function with a parameter `context` that returns a Drafter, a draft function
            `(tokens, limit) -> list[int]`, or a Drafter. Its other parameters are the options of the spec; one named
            `target` takes the text after the colon.

    Raises:
        ConfigError: the name is taken or no name, or the factory is none of these.
    """
    parts = parse_drafter_spec(name)
    if len(parts) != 1 or parts[0].name != name:
        raise ConfigError(f"a drafter's name is one word of letters, digits, '_', '-' and dots, got {name!r}")
    if name in _BUILT_INS or name in _registered:
        raise ConfigError(f"a drafter named {name!r} exists already")
    _Recipe.of(name, factory)
    _registered[name] = factory


def register_instance(obj: Drafter | Factory) -> str:
    """Registers a drafter, or anything `register_drafter` takes, under a new name, and returns that name as a spec."""
    kind = obj.__name__ if hasattr(obj, "__name__") else type(obj).__name__
    word = "".join(char for char in kind if char.isascii() and (char.isalnum() or char == "_")).lower().lstrip("_0123456789")
    name = f"{word or 'drafter'}-{next(_numbers)}"
    register_drafter(name, obj)  # type: ignore[arg-type]  # a Drafter is checked for there
    _unnamed.add(name)
    return name


def unregister(name: str) -> None:
    """Forgets a registered name; engines that use the drafter keep it."""
    _registered.pop(name, None)
    _unnamed.discard(name)


def is_registered(name: str) -> bool:
    """Whether this process or an installed package registered the name."""
    return name in _registered or bool(entry_points(group=ENTRY_POINT_GROUP, name=name))


def known_drafters() -> list[str]:
    """Names that a spec may begin with, beside modules and those that `register_instance` made up."""
    return sorted({"off", *_BUILT_INS, *(_registered.keys() - _unnamed), *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def check_spec(text: str) -> None:
    """Raises ConfigError if a spec names an unknown drafter or option, or a value that cannot be. Loads no model."""
    for part in parse_drafter_spec(text):
        check_part(part)


def check_part(part: DrafterSpec) -> None:
    """`check_spec` for one part."""
    recipe = _find(part)
    values = check_options(part, recipe.signature, target=recipe.target)
    if recipe.check is not None:
        recipe.check(**values)


def model_of(part: DrafterSpec, config: EngineConfig) -> tuple[str, str] | None:
    """The model that a part of a spec loads and its dtype, for planning memory; None where it loads none, or none that is known here."""
    built_in = _BUILT_INS.get(part.name)
    if built_in is None or not built_in.loads_model or part.target is None:
        return None
    from specdec.drafters.draft_model import draft_dtype

    own = dict(part.options).get("dtype")
    return part.target, draft_dtype(config, part.target, None if own is None else str(own))


def create_drafter(part: DrafterSpec, context: DrafterContext) -> Drafter:
    """Builds the drafter that one part of a spec names.

    Raises:
        ConfigError: as `check_spec`.
        DrafterError: the drafter cannot be built.
    """
    from specdec.drafters.base import Drafter
    from specdec.drafters.function import FunctionDrafter

    recipe = _find(part)
    values: dict[str, Any] = dict(check_options(part, recipe.signature, target=recipe.target))
    if recipe.check is not None:
        recipe.check(**values)
    if recipe.function:
        return FunctionDrafter(partial(recipe.build, **values) if values else recipe.build)
    if recipe.signature.context:
        values["context"] = context
    try:
        built = recipe.build(**values)
    except (SpecdecError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a drafter that calls sys.exit() must not end the server
        raise DrafterError(f"drafter {part}: cannot be built: {type(error).__name__}: {error}") from error
    if isinstance(built, Drafter):
        return built
    if callable(built) and not inspect.isclass(built):
        return FunctionDrafter(built)
    raise DrafterError(f"drafter {part}: its factory must return a Drafter or a draft function, got {type(built).__name__}")


@dataclass(frozen=True)
class _Recipe:
    """How to build a drafter: `build(**options)`, or for a draft `function` itself with the options bound."""

    build: Factory
    signature: Signature
    function: bool = False
    target: str | None = None
    check: Callable[..., None] | None = None

    @staticmethod
    def of(name: str, obj: Factory | Drafter, target: str | None = None, check: Callable[..., None] | None = None) -> _Recipe:
        from specdec.drafters.base import Drafter

        if isinstance(obj, Drafter):
            return _Recipe(lambda: obj, Signature(False, False, {}, frozenset(), False), target=target)
        if inspect.isclass(obj) and not issubclass(obj, Drafter):
            raise ConfigError(f"drafter {name!r}: a class must derive from specdec.Drafter, got {obj.__qualname__}")
        if not callable(obj):
            raise ConfigError(f"drafter {name!r}: expected a Drafter, a factory or a function (tokens, limit), got {type(obj).__name__}")
        signature = read_signature(obj)
        if inspect.isclass(obj) or signature.context:
            return _Recipe(obj, signature, target=target, check=check)
        try:
            inspect.signature(obj).bind([], 1)
        except TypeError:
            raise ConfigError(
                f"drafter {name!r}: a draft function is called as function(tokens, limit) and a factory has a parameter 'context'; "
                f"got {name}{inspect.signature(obj)}"
            ) from None
        return _Recipe(obj, read_signature(obj, skip=2), function=True, target=target, check=check)


def _find(part: DrafterSpec) -> _Recipe:
    built_in = _BUILT_INS.get(part.name)
    if built_in is not None:
        return _Recipe.of(part.name, _load(built_in.factory), part.target, _load(built_in.check))
    if part.name in _registered:
        return _Recipe.of(part.name, _registered[part.name], part.target)
    for point in entry_points(group=ENTRY_POINT_GROUP, name=part.name):
        return _Recipe.of(part.name, point.load(), part.target)
    if part.target is None:
        raise ConfigError(f"unknown drafter {part.name!r}{_suggestion(part.name)} known: {', '.join(known_drafters())}, or module:name")
    return _Recipe.of(f"{part.name}:{part.target}", _import_custom(part.name, part.target))


def _import_custom(module_name: str, attribute: str) -> Factory:
    spec = f"drafter {module_name}:{attribute}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(f"{spec}: module {module_name!r} needs {error.name!r}, which is not installed") from error
        raise ConfigError(
            f"{spec}: no drafter and no Python module is named {module_name!r}{_suggestion(module_name)} "
            f"known: {', '.join(known_drafters())}, or module:name"
        ) from None
    except Exception as error:  # whatever a user's module raises on import is told as a fault of that option
        raise ConfigError(f"{spec}: importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    found: Any = module
    for word in attribute.split("."):
        if not hasattr(found, word):
            near = difflib.get_close_matches(word, dir(found), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{spec}: {module_name!r} has no {word!r}{hint}")
        found = getattr(found, word)
    factory: Factory = found
    return factory


def _load(path: str) -> Factory:
    module, _, attribute = path.partition(":")
    factory: Factory = getattr(importlib.import_module(module), attribute)
    return factory


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, known_drafters(), 1)
    return f", did you mean {near[0]!r}?" if near else ";"
