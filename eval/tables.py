"""Tables of text, and what stands in them. Arithmetic and text only."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Columns under each other: those in `left` to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def short_spec(spec: str) -> str:
    """A drafter spec without the folders of its paths."""
    return re.sub(r":[^()+]*/", ":", spec)


def format_bytes(size: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of 1 or more: `98.4 MB`."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
