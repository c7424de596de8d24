"""Where a number comes from: versions, hardware, commit, command."""

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import memoryathena


def provenance(command: str | None = None) -> dict[str, Any]:
    """Everything about this process that its results may depend on, beside the recipe."""
    return {
        "command": command if command is not None else shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **commit(),
        "versions": versions(),
        "hardware": hardware(),
    }


def versions() -> dict[str, str]:
    """Of what computes."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "memoryathena": memoryathena.__version__,
    }


def hardware() -> dict[str, Any]:
    """The machine, in words and numbers."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpu": ", ".join(gpus) or None,
    }


def commit() -> dict[str, Any]:
    """Commit of this package's sources, and whether they were changed since.

    Where a run has a copy without its history, MEMORYATHENA_COMMIT says what it is a copy of.
    """
    if given := os.environ.get("MEMORYATHENA_COMMIT"):
        return {"commit": given.removesuffix("+dirty"), "dirty": given.endswith("+dirty")}
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "dirty": None if head is None else bool(changes)}


def _git(*words: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        folder = Path(memoryathena.__file__).parent
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()
    return None


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return None
