"""The Triton kernels without a GPU: interpreted against their references, and compiled for an H200.

Triton reads TRITON_INTERPRET when it is imported, so each runs in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install 'specdec[cuda]')")


def run(arguments: list[str], environment: dict[str, str], folder: Path) -> str:
    """Runs Python; Triton's cache goes into `folder`. Returns what it printed; fails with it."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"} | environment
    result = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_kernels_equal_their_references_in_the_interpreter(tmp_path: Path) -> None:
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_interpreted.py")]
    assert " passed" in run(arguments, {"TRITON_INTERPRET": "1"}, tmp_path)


def test_kernels_compile_for_sm_90_without_a_gpu(tmp_path: Path) -> None:
    printed = run(["-W", "error", str(HERE / "triton_compiled.py")], {}, tmp_path)
    assert [line.split()[0] for line in printed.splitlines()] == ["race", "best_part", "walk", "move", "remains"]
