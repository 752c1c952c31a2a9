"""Whole checkpoints of drafters that share weights with the target: ``python -m ...compose TARGET MODULE OUT``.

In git lies what was trained; the target's own weights are added where the drafter is used.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specgram_lab.drafters import draft_model, mtp

WRITERS = {"LlamaForCausalLM": draft_model.complete, "MiMoMTPModel": mtp.carry}


def main(target: Path, module: Path, folder: Path) -> None:
    """Write ``module`` and what it lacks of ``target`` to ``folder``."""
    config = json.loads((module / "config.json").read_text(encoding="utf-8"))
    WRITERS[config["architectures"][0]](target, module, folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
