"""Verification: logits to choices, and the walk that decides which drafted nodes stand. Knows no drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.backend.base import Backend
from specdec.errors import ConfigError
from specdec.verifier.base import Rule, Transform
from specdec.verifier.coupled import CoupledRule
from specdec.verifier.rejection import RejectionRule
from specdec.verifier.transforms import ParameterTransform
from specdec.verifier.traversal import TraversalRule
from specdec.verifier.verifier import Verifier

_RULES: dict[str, Callable[[Backend], Rule]] = {"coupled": CoupledRule, "rejection": RejectionRule, "traversal": TraversalRule}


def create_rule(name: str, backend: Backend) -> Rule:
    """The rule of a name. Raises ConfigError for a name that is none."""
    if name not in _RULES:
        raise ConfigError(f"verify_rule must be one of {', '.join(_RULES)}, got {name!r}")
    return _RULES[name](backend)


def create_verifier(default: str, backend: Backend, transforms: Sequence[Transform] = ()) -> Verifier:
    """A verifier with every rule, `default` for requests that name none; `transforms` come after those of the parameters."""
    return Verifier({name: create_rule(name, backend) for name in _RULES}, default, transforms=(ParameterTransform(), *transforms))
