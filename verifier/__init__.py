"""Verification: logits to choices, and the walk that decides which drafted nodes stand. Knows no drafter."""

from __future__ import annotations

from specdec.backend.base import Backend
from specdec.errors import ConfigError
from specdec.verifier.base import Verifier


def create_verifier(rule: str, backend: Backend) -> Verifier:
    """The verifier of a rule name. Raises ConfigError for a name that is none."""
    if rule != "coupled":
        raise ConfigError(f"verify_rule must be coupled, got {rule!r}")
    from specdec.verifier.coupled import CoupledVerifier

    return CoupledVerifier(backend)
