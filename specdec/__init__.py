"""specdec: an LLM inference framework built around speculative decoding.

Names are re-exported lazily (PEP 562), so that `import specdec` costs nothing until something is used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# GNU OpenMP spins at the end of every parallel region; with any other busy thread on the machine (an HTTP server, a
# client) a region then takes several times as long. It reads this when torch loads it, so it has to be set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "specdec.llm",
    "GenerationOutput": "specdec.llm",
    "Choice": "specdec.llm",
    "Engine": "specdec.engine",
    "EngineConfig": "specdec.config",
    "Constraint": "specdec.request",
    "SamplingParams": "specdec.request",
    "RequestStats": "specdec.request",
    "Event": "specdec.plan",
    "DraftNeeds": "specdec.plan",
    "DraftTree": "specdec.tree",
    "Drafter": "specdec.drafters.base",
    "DraftRow": "specdec.drafters.base",
    "DraftOutcome": "specdec.drafters.base",
    "DrafterContext": "specdec.drafters.base",
    "register_drafter": "specdec.drafters.registry",
}

__all__ = [*sorted(_EXPORTS), "__version__"]

if TYPE_CHECKING:
    from specdec.config import EngineConfig as EngineConfig
    from specdec.drafters.base import Drafter as Drafter
    from specdec.drafters.base import DrafterContext as DrafterContext
    from specdec.drafters.base import DraftOutcome as DraftOutcome
    from specdec.drafters.base import DraftRow as DraftRow
    from specdec.drafters.registry import register_drafter as register_drafter
    from specdec.engine import Engine as Engine
    from specdec.llm import LLM as LLM
    from specdec.llm import Choice as Choice
    from specdec.llm import GenerationOutput as GenerationOutput
    from specdec.plan import DraftNeeds as DraftNeeds
    from specdec.plan import Event as Event
    from specdec.request import Constraint as Constraint
    from specdec.request import RequestStats as RequestStats
    from specdec.request import SamplingParams as SamplingParams
    from specdec.tree import DraftTree as DraftTree


def __getattr__(name: str) -> Any:  # whatever the exporting module holds under that name
    if name not in _EXPORTS:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
