"""Public pairs of target and drafter for machines with a GPU: what vLLM needs to run them, and what is missing here."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Annotated, Any

from pydantic import Field

from specgram_lab import capabilities, hub
from specgram_lab.paths import DATA
from specgram_lab.spec import Method, Model, SpecError, parse_cell, read_yaml

FOLDER = DATA / "presets"
MAX_MODEL_LEN = 4096
KV_CACHE_MIB = 8192


class Preset(Model):
    """One pair. ``drafter`` is empty where the target's checkpoint holds it.

    ``vllm`` is the oldest release that the source, or code read for this, vouches for; ``serve`` has further options
    of ``vllm serve``; ``memory_gb`` is the GPU memory that the source asks for; ``status`` says whether it was run.
    """

    name: str
    method: Method
    target: str
    drafter: str | None = None
    k: Annotated[int, Field(ge=1)]
    vllm: str
    serve: dict[str, str | int] = Field(default_factory=dict)
    memory_gb: Annotated[int, Field(ge=1)] | None = None
    source: str
    about: str
    status: str

    @property
    def speculative_config(self) -> dict[str, Any]:
        """As vLLM takes it."""
        config: dict[str, Any] = {"method": "dflash" if self.method == "dflash2" else self.method}
        if self.drafter is not None:
            config["model"] = self.drafter
        return config | {"num_speculative_tokens": self.k}

    @property
    def command(self) -> str:
        """The server's command line."""
        words = ["vllm", "serve", self.target, "--speculative-config", json.dumps(self.speculative_config)]
        for option, value in self.serve.items():
            words += [f"--{option}", str(value)]
        return shlex.join(words)

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """``target``, ``drafter`` and ``engine`` of a cell's spec."""
        engine: dict[str, Any] = {
            "device": "cuda", "runner": "v2", "enforce_eager": False, "kv_cache_mib": KV_CACHE_MIB,
        }  # fmt: skip
        if "max-num-batched-tokens" in self.serve:
            engine["max_num_batched_tokens"] = int(self.serve["max-num-batched-tokens"])
        return {
            "target": {"model": self.target, "max_model_len": MAX_MODEL_LEN},
            "drafter": {"method": self.method, "model": self.drafter or "target", "k": self.k},
            "engine": engine,
        }


def names() -> list[str]:
    """All presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Preset:
    """The preset of that name.

    Raises:
        SpecError: there is none, with the names that exist.
    """
    if name not in names():
        raise SpecError(f"no preset {name!r}: there are {', '.join(names())}")
    return Preset.model_validate({**read_yaml(FOLDER / f"{name}.yaml"), "name": name})


def missing(preset: Preset) -> list[str]:
    """What stands between this machine and the pair, one sentence each; empty where nothing is known to."""
    found = []
    distribution, release = capabilities.build()
    cell = parse_cell({**preset.parts, "workload": {"inline": ["x"]}})
    refused = capabilities.refusal(cell, weights=False)
    if refused is not None:
        found.append(refused)
    if distribution and _numbers(release) < _numbers(preset.vllm):
        found.append(f"{distribution} {release} is installed, {preset.vllm} or later is needed")
    if preset.memory_gb is not None and capabilities.has_cuda() and (there := gpu_memory_gb()) < preset.memory_gb:
        found.append(
            f"the source asks for {preset.memory_gb} GB of GPU memory, the largest GPU here has {there:.0f} GB"
        )
    for name in filter(None, (preset.target, preset.drafter)):
        if hub.snapshot(name) is None:
            how = "HF_HUB_OFFLINE forbids to download it" if hub.offline() else "vLLM will download it"
            found.append(f"{name} is not in {hub.cache()}: {how}")
    return found


def gpu_memory_gb() -> float:
    """Memory of the largest GPU, in 10^9 bytes, as nvidia-smi says; 0 without it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0.0
    return max((float(line) * (1 << 20) / 1e9 for line in done.stdout.split() if line.isdecimal()), default=0.0)


def examine(name: str) -> dict[str, Any]:
    """The preset, its command and what is missing here, as plain data."""
    preset = load(name)
    return {**preset.model_dump(), "command": preset.command, "missing": missing(preset)}


def to_text(report: dict[str, Any]) -> str:
    """`examine` for a terminal."""
    lines = [f"preset {report['name']} ({report['status']}): {report['about']}"]
    lines += [f"source: {report['source']}", f"  {report['command']}"]
    lines += [f"missing here: {sentence}" for sentence in report["missing"]] or ["nothing is known to be missing here"]
    return "\n".join(lines)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.partition("+")[0].split(".")[:3] if part.isdecimal())
