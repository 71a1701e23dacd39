"""The machine that figures were taken on: names, versions, and how fast it reads memory."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.memory import free_memory

BUSY_CORES = 0.25
"""Other programs that use more than this show in the figures."""
READ_BYTES = 1 << 30  # far larger than any cache, so that it is memory that is read


def describe_machine() -> dict[str, Any]:
    """Processor, cores that this process may use, and system; JSON values."""
    return {"cpu": cpu_name(), "cores": num_cores(), "system": platform.platform()}


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores(seconds: float = 0.5) -> float | None:
    """Cores that all programs together keep busy, watched for so long; None where the system does not tell.

    Watched while nothing of one's own runs, it says what others do to the figures.
    """
    before = _processor_times()
    time.sleep(seconds)
    after = _processor_times()
    if not before or not after:
        return None
    spent = [now - then for now, then in zip(after, before, strict=True)]
    idle = spent[3] + spent[4]  # waiting for input and output is idle too
    return (os.cpu_count() or 1) * (1 - idle / sum(spent)) if sum(spent) else 0.0


def _processor_times() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal; in ticks, all cores together."""
    try:
        return [int(number) for number in Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()[1:9]]
    except OSError:
        return []


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"specdec": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class ReadBandwidth:
    """Reads one large buffer with as many threads as torch uses: what weights can be read at, at best.

    The reduction is an integer maximum, which costs next to nothing beside the reading of its operands.

    Attributes:
        num_bytes: size of the buffer, at most a quarter of the free memory.
        samples: bytes per second, one per `sample()`.
    """

    def __init__(self, num_bytes: int = READ_BYTES) -> None:
        import torch

        self.num_bytes = min(num_bytes, free_memory() // 4) // 8 * 8
        self.num_threads = torch.get_num_threads()
        self.samples: list[float] = []
        # written, since pages that never were are all the same page of zeros
        self._buffer = torch.ones(self.num_bytes // 8, dtype=torch.int64)

    def sample(self) -> float:
        """Reads the buffer once; bytes per second."""
        start = time.perf_counter()
        self._buffer.max()
        self.samples.append(self.num_bytes / (time.perf_counter() - start))
        return self.samples[-1]

    def __str__(self) -> str:
        return f"torch.max over {self.num_bytes / 1e9:.2f} GB of int64 with {self.num_threads} threads"
