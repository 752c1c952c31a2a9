"""The analysis layers work where neither vLLM nor torch is installed, and never import them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONTRACT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"][0]


def test_the_contract_is_kept():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    done = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 kept, 0 broken" in done.stdout


def test_the_layers_import_without_them():
    """In a process where importing them fails, as on a machine that does not have them."""
    block = "import sys\nfor name in {names!r}: sys.modules[name] = None\n".format(names=CONTRACT["forbidden_modules"])
    imports = "\n".join(f"import {name}" for name in CONTRACT["source_modules"])
    done = subprocess.run([sys.executable, "-c", block + imports], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
