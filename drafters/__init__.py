"""Drafters: what they are (`base`), where they come from (`registry`) and how the engine asks them (`router`).

Names are re-exported lazily, so that checking a spec or printing help does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.drafters.base import Drafter, DrafterContext, DraftOutcome, DraftRow
    from specdec.drafters.function import FunctionDrafter
    from specdec.drafters.registry import check_spec, create_drafter, register_drafter, register_instance, unregister
    from specdec.drafters.router import DrafterRouter

_HOMES = {
    "DraftOutcome": "base",
    "DraftRow": "base",
    "Drafter": "base",
    "DrafterContext": "base",
    "DrafterRouter": "router",
    "FunctionDrafter": "function",
    "check_spec": "registry",
    "create_drafter": "registry",
    "register_drafter": "registry",
    "register_instance": "registry",
    "unregister": "registry",
}

__all__ = [
    "DraftOutcome",
    "DraftRow",
    "Drafter",
    "DrafterContext",
    "DrafterRouter",
    "FunctionDrafter",
    "check_spec",
    "create_drafter",
    "register_drafter",
    "register_instance",
    "unregister",
]


def __getattr__(name: str) -> Any:  # whatever the named module exports
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
