"""Help for authors of drafters: tiny models, scripted drafters, a context without an engine, and a conformance kit.

from specdec.testing import check_drafter
check_drafter("my_package.drafters:MyDrafter")
"""

from __future__ import annotations

from specdec.testing.conformance import ConformanceReport, check_drafter
from specdec.testing.context import ScratchKV, make_context, make_row
from specdec.testing.drafters import Alt, Anti, Empty, OneHot, Oracle, RandomTree, Script, Scripted, Table, self_drafter, table
from specdec.testing.fixtures import (
    NEVER,
    TINY_MAX_LENGTH,
    TINY_PROMPT_LENGTHS,
    TINY_SEED,
    TINY_VOCAB_SIZE,
    tiny_prompt,
    write_bigram_checkpoint,
    write_const_checkpoint,
    write_tiny_checkpoint,
)

__all__ = [
    "NEVER",
    "TINY_MAX_LENGTH",
    "TINY_PROMPT_LENGTHS",
    "TINY_SEED",
    "TINY_VOCAB_SIZE",
    "Alt",
    "Anti",
    "ConformanceReport",
    "Empty",
    "OneHot",
    "Oracle",
    "RandomTree",
    "ScratchKV",
    "Script",
    "Scripted",
    "Table",
    "check_drafter",
    "make_context",
    "make_row",
    "self_drafter",
    "table",
    "tiny_prompt",
    "write_bigram_checkpoint",
    "write_const_checkpoint",
    "write_tiny_checkpoint",
]
