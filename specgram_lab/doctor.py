"""What is installed here: which fixes it contains and what follows, what can run, and why the rest cannot.

Looks without importing vLLM or torch.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal, get_args

from specgram_lab import capabilities, models, provenance
from specgram_lab.builders import options
from specgram_lab.drafters import registry
from specgram_lab.fixes import report as fixes
from specgram_lab.fixes.configuration import Configuration
from specgram_lab.fixes.source import SourceError, installed, open_source
from specgram_lab.scenarios import Side
from specgram_lab.spec import NEEDS_WEIGHTS, Budget, Cell, Drafter, Engine, Method, Target, Workload

Runner = Literal["v1", "v2"]
RUNNERS: tuple[Runner, ...] = get_args(Runner)
INTERPRETER_TRITON = "3.9.0"
"""The release of Triton whose interpreter the lab's mends were written for."""


def examine() -> dict[str, Any]:
    """What is installed and what can run, as plain data."""
    name, release = capabilities.build()
    return {
        "python": platform.python_version(),
        "vllm": {"distribution": name, "version": release} if name else None,
        "device": "cuda" if capabilities.has_cuda() else "cpu",
        "packages": provenance.versions(),
        "target": {n: str(models.model_dir(n)) if models.is_ready(n) else None for n in models.PACKAGED},
        "faults": faults(),
        "runners": runners(),
        "scheduling": {side: verdict(Engine(scheduling=side)) for side in get_args(Side)},
        "adaptive_verification": {r: verdict(adaptive(r), "dspark" if r == "v2" else "mtp") for r in RUNNERS},
        "drafters": {method: drafter(method) for method in get_args(Method)},
        "kernels": kernels(),
    }


def of_build(place: Path | None, configuration: Configuration | None) -> dict[str, Any] | None:
    """Which fixes a build contains and what follows for a server: a wheel, a folder, or what is installed.

    Returns:
        `fixes.report.of_build`; None where nothing is installed and no server was asked about.

    Raises:
        SourceError: there is no vLLM to answer with.
    """
    source = installed() if place is None else open_source(place)
    if source is not None:
        return fixes.of_build(source, configuration)
    if configuration is None:
        return None
    raise SourceError("no vLLM is installed here; --wheel reads one from a file or a folder")


def adaptive(runner: Runner) -> Engine:
    """An engine with adaptive verification; without CUDA graphs only where the lab's patch takes that wish away."""
    return Engine(runner=runner, budget=Budget(policy="native"), enforce_eager=not capabilities.has_cuda())


def verdict(engine: Engine, method: Method = "none") -> str:
    """``ok``, or why a cell with this engine cannot run here; weights are taken to be there."""
    model = "target" if method in NEEDS_WEIGHTS else None
    drafter = Drafter(method=method, k=0 if method == "none" else 3, model=model)
    workload = Workload(scenario="row-a") if method == "scripted" else Workload(inline=("x",))
    cell = Cell(target=Target(), drafter=drafter, engine=engine, workload=workload)
    return capabilities.refusal(cell, weights=False) or "ok"


def runners() -> dict[str, str]:
    """Whether each model runner can run here."""
    found: dict[str, str] = {runner: verdict(Engine(runner=runner)) for runner in RUNNERS}
    if found["v2"] == "ok" and not capabilities.has_cuda():
        try:
            triton = version("triton")
        except PackageNotFoundError:
            triton = "no triton"
        if triton != INTERPRETER_TRITON:
            found["v2"] = f"on a CPU it needs triton {INTERPRETER_TRITON} for its interpreter, {triton} is installed"
    return found


def drafter(method: Method) -> dict[str, str]:
    """What a drafter can run with, by runner and scheduling."""
    found = {
        f"{runner} {side}": verdict(Engine(runner=runner, scheduling=side), method)
        for runner in RUNNERS
        for side in get_args(Side)
    }
    if method in NEEDS_WEIGHTS and method != "draft_model":
        found["weights"] = "none come with the lab; give a checkpoint as the drafter's model"
        if registry.is_trained(method):
            place = "target's" if method == "mtp" else "drafter's"
            found["weights"] = f"trained for {Target().model}: {method} as the {place} model; or a checkpoint of yours"
    return found


def faults() -> list[str]:
    """Faults of the installation that would break a run later, one sentence each."""
    found = []
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    if "+cpu" in torch:
        for name in ("torchvision", "torchaudio", "torchcodec"):
            try:
                other = version(name)
            except PackageNotFoundError:
                continue
            if "+cpu" not in other:
                found.append(
                    f"{name} {other} is a CUDA build beside torch {torch}; models fail to import: pip uninstall {name}"
                )
    name, release = capabilities.build()
    if name and torch:
        wanted = next((r for r in requires(name) or [] if r.startswith("torch==")), "")
        pinned = wanted.partition("==")[2].partition(";")[0].strip()
        if pinned and pinned.partition("+")[0] != torch.partition("+")[0]:
            found.append(f"{name} {release} asks for torch {pinned}, installed is {torch}")
    return found


def kernels() -> dict[str, str]:
    """Triton kernels of the installed vLLM that runner V2 may launch on a CPU: native, interpreted or unknown.

    Asked in a process of its own, which has the interpreter and imports vLLM; empty where that cannot be.
    """
    if not capabilities.build()[0] or capabilities.has_cuda():
        return {}
    environment = {**os.environ, **options.interpreter(os.environ)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "specgram_lab.builders.cpu.kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.strip().splitlines()
    return dict(json.loads(lines[-1])) if done.returncode == 0 and lines else {}


def to_text(report: dict[str, Any]) -> str:
    """`examine` for a terminal."""
    build = report["vllm"]
    lines = [
        f"Python {report['python']}, {build['distribution'] + ' ' + build['version'] if build else 'no vLLM'},"
        f" device {report['device']}",
        "packages: " + ", ".join(f"{k} {v}" for k, v in report["packages"].items()),
    ]
    for name, folder in report["target"].items():
        lines.append(f"target {name}: {folder or 'not fetched yet (specgram fetch, or make demo)'}")
    lines += [f"FAULT: {fault}" for fault in report["faults"]]
    for part in ("runners", "scheduling", "adaptive_verification"):
        lines += ["", part.replace("_", " ") + ":"]
        lines += [f"  {name:6} {text}" for name, text in report[part].items()]
    lines += ["", "drafters (runner and scheduling):"]
    for method, found in report["drafters"].items():
        good = [key for key, text in found.items() if text == "ok"]
        lines.append(f"  {method:12} {', '.join(good) or 'cannot run here'}")
        reasons: dict[str, list[str]] = {}
        for key, text in found.items():
            if text != "ok":
                reasons.setdefault(text, []).append(key)
        lines += [f"{'':15}{', '.join(keys)}: {text}" for text, keys in reasons.items()]
    if report["kernels"]:
        counts = {
            kind: sum(v == kind for v in report["kernels"].values()) for kind in ("native", "interpreted", "unknown")
        }
        lines += ["", "kernels of runner V2 on a CPU: " + ", ".join(f"{n} {kind}" for kind, n in counts.items())]
        lines += [f"  {kind:12} {name}" for name, kind in sorted(report["kernels"].items()) if kind != "native"]
    return "\n".join(lines)
