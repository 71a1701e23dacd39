"""What all tests share: few threads, no network, and the demo model where set-up has fetched it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Path of the demo model; skips where it has not been fetched."""
    from specdec.models.demo import demo_path

    path = Path(demo_path())
    if not path.is_file():
        pytest.skip("the demo model is not there: run `make setup`")
    return path
