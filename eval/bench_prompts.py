"""The prompts that `specdec bench` decodes: edits, prose, code and lists in turn, so that any few of them are a mixture."""

from __future__ import annotations

from specdec.eval.datasets import PromptRow

_FUNCTION = """def {name}(rows):
    total = 0
    for row in rows:
        if row["{field}"] is None:
            continue
        total += row["{field}"]
    return total / len(rows) if rows else 0
"""
_KINDS = {
    "edit": "Rename `total` to `{name}_sum` in this function. Return the whole function, otherwise unchanged.\n\n" + _FUNCTION,
    "prose": "Tell a short story about a {field} that is found in an old lighthouse, and about the child who finds it.",
    "code": "Write a Python class `{title}` that stores records with a `{field}`, and has methods to add, remove, find and sort them.",
    "list": "Count from 1 to 30, one number per line, and write the word '{field}' after every number.",
}
_SUBJECTS = (("mean_price", "price"), ("average_weight", "weight"), ("mean_letter", "letter"), ("mean_signal", "signal"))

SHIPPED = tuple(
    PromptRow(f"{kind}_{field}", kind, (text.format(name=name, field=field, title=field.capitalize() + "Book"),))
    for name, field in _SUBJECTS
    for kind, text in _KINDS.items()
)
"""16 rows; each four in a row are one of each kind."""
