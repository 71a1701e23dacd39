"""Constrained decoding: an output that matches a JSON schema, a regular expression, a list of choices or a grammar.

sources     Constraint -> grammar text of llguidance, which does the parsing
vocabulary  the model's tokenizer as llguidance needs it
compiler    grammar text -> Grammar, cached and limited, from any thread
marker      the text behind which a constraint begins
state       one request: which tokens are legal at every node of its draft, and when the output is complete
transform   masks the logits of a step
"""

from __future__ import annotations

from specdec.verifier.constraints.compiler import Grammar, GrammarCompiler
from specdec.verifier.constraints.state import ConstraintState
from specdec.verifier.constraints.transform import Constraints

__all__ = ["ConstraintState", "Constraints", "Grammar", "GrammarCompiler"]
