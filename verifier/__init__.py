"""Verification: logits to choices, and the walk that decides which drafted nodes stand. Knows no drafter."""

from __future__ import annotations

from specdec.backend.base import Backend
from specdec.errors import ConfigError
from specdec.verifier.base import Rule
from specdec.verifier.verifier import Verifier


def create_rule(name: str, backend: Backend) -> Rule:
    """The rule of a name. Raises ConfigError for a name that is none."""
    if name == "coupled":
        from specdec.verifier.coupled import CoupledRule

        return CoupledRule(backend)
    raise ConfigError(f"verify_rule must be coupled, got {name!r}")


def create_verifier(default: str, backend: Backend) -> Verifier:
    """A verifier with every rule, `default` for requests that name none."""
    return Verifier({default: create_rule(default, backend)}, default)
