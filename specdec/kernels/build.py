"""Builds the C++ kernels on first use with the system compiler, and loads them with ctypes.

The library is cached by the hash of sources, flags, compiler and processor, and put in place atomically, so that two
processes that build it at once do no harm. Only plain C functions are exported: no Python or torch headers, so a build
takes some ten seconds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from specdec.cache import cache_dir
from specdec.errors import KernelError

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
# Sums may be reordered by the compiler, once and for all: the order is then the same in every call. The library is
# linked without -fopenmp so that GOMP_* binds to the OpenMP runtime that torch has loaded; a second runtime would
# bring a second set of threads.
COMPILE_FLAGS = (
    *("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)


@functools.cache
def load_cpu_kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None (with one warning) where they can't be built. `SPECDEC_NO_KERNELS=1` says not to."""
    if os.environ.get("SPECDEC_NO_KERNELS") == "1":
        return None
    try:
        return _load(_build())
    except (KernelError, OSError) as error:
        logger.warning("running without compiled kernels, attention and sampling are about ten times slower: %s", error)
        return None


def _load(path: Path) -> ctypes.CDLL:
    try:
        # torch exports its OpenMP runtime through this library only
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"cannot load {path}: {error}") from error


def cpu_kernels_are_missing() -> bool:
    """Whether `load_cpu_kernels` will have to compile, which takes a while: worth a word to the user beforehand."""
    if os.environ.get("SPECDEC_NO_KERNELS") == "1":
        return False
    try:
        return not _library(_compiler()).exists()
    except (KernelError, OSError):
        return False  # there will be none, and `load_cpu_kernels` says why


def _build() -> Path:
    compiler = _compiler()
    library = _library(compiler)
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = _compile(compiler, _sources(), Path(scratch))
            os.replace(built, library)
    return library


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelError("no C++ compiler found; install g++ or clang, or set CXX")
    return compiler


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _library(compiler: str) -> Path:
    """Where the library lies, or will."""
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    for part in (*COMPILE_FLAGS, compiler, version, _processor(), torch.__version__):
        digest.update(part.encode() + b"\0")
    for source in (*_sources(), *sorted(SOURCES.glob("*.h"))):
        digest.update(source.read_bytes())
    return cache_dir("kernels") / f"cpu-{digest.hexdigest()[:24]}.so"


def _compile(compiler: str, sources: list[Path], scratch: Path) -> Path:
    objects = {source: str(scratch / f"{source.stem}.o") for source in sources}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(lambda source: _run([compiler, *COMPILE_FLAGS, "-c", str(source), "-o", objects[source]]), sources))
    built = scratch / "kernels.so"
    _run([compiler, "-shared", *objects.values(), "-o", str(built)])
    return built


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise KernelError(f"{' '.join(command)} failed with exit code {result.returncode}:\n{result.stderr[-2000:]}")


def _processor() -> str:
    """What -march=native depends on: a cached library must not be run on a lesser processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
