"""How a trained drafter stands in a cell: which target, which method, which model."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from specgram_lab import models
from specgram_lab.drafters import registry
from specgram_lab.paths import cache_dir

TARGET = "smollm2-135m"
BLOCKS = frozenset({"dflash", "dflash2", "dspark"})
"""Methods whose drafter proposes blocks of the length that it was trained for."""


def parts(name: str, k: int | None = None) -> dict[str, dict[str, Any]]:
    """``target`` and ``drafter`` of a cell with the trained drafter ``name``; its own k unless another is given.

    A multi-token-prediction module is no checkpoint of its own: the target that holds it is written to the cache
    folder, once for each version of the module.

    Raises:
        ModelError: that target could not be written, or the plain one cannot be had.
    """
    about = registry.card(registry.folder(name))
    drafter = {"method": about["method"], "model": name, "k": k or about["k"]}
    if about["method"] != "mtp":
        return {"target": {"model": TARGET}, "drafter": drafter}
    return {"target": {"model": str(carried(registry.folder(name)))}, "drafter": {**drafter, "model": "target"}}


def lengths(name: str, asked: list[int]) -> list[int]:
    """Which of the draft lengths ``asked`` the drafter can be measured at."""
    about = registry.card(registry.folder(name))
    return [k for k in asked if about["method"] not in BLOCKS or k == about["k"]]


def carried(module: Path) -> Path:
    """The target with the module beside it, in the cache folder."""
    target = models.ensure(TARGET)
    folder = cache_dir() / "models" / f"{TARGET}-mtp-{models.sha256(module / 'model.safetensors')[:12]}"
    if not (folder / "config.json").is_file():
        with tempfile.TemporaryDirectory(dir=folder.parent) as tmp:
            made = Path(tmp) / "made"
            command = [sys.executable, "-m", "specgram_lab.drafters.mtp", str(target), str(module), str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise models.ModelError(f"the target could not be written with the module of {module}: {reason}")
            made.rename(folder)
    return folder
