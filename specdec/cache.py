"""Where things that can be made again are kept: compiled kernels, converted weights, the demo model."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """`$SPECDEC_CACHE` (default `~/.cache/specdec`) joined with `parts`, made if it is not there."""
    root = os.environ.get("SPECDEC_CACHE") or str(Path("~/.cache/specdec").expanduser())
    folder = Path(root, *parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
