"""What a vLLM build contains, told from its version, and from what it says and sends where that is better evidence.

A server's code cannot be read from outside, so the table of releases that were read (`specgram_lab.fixes.table`) stands
in for it; for other releases and for builds of a branch nothing is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from specgram_lab.fixes import table
from specgram_lab.fixes.catalog import BY_NAME
from specgram_lab.fixes.finding import Fix

CHANGES: Final[tuple[Fix, ...]] = tuple(
    BY_NAME[name]
    for name in (
        "stops-at-end", "probe-guard", "draft-probe-named", "per-request-metrics", "masks-after-refusal",
        "pipeline-async-refused", "unseen-drafts-invalid", "compact-separators", "verified-counter",
        "bounded-whitespace",
    )
)  # fmt: skip
"""What somebody who sees a server from outside should know about it."""


def release(version: str | None) -> tuple[int, int] | None:
    """(major, minor) of a released version; None for anything else (a build of a branch, a release candidate)."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?(?:\+(?:cpu|cu\d+|rocm[\d.]*))?", version or "")
    return (int(found[1]), int(found[2])) if found else None


def contains(change: Fix, version: str | None) -> bool | None:
    """Whether the build has the change; None where it cannot be told from the version."""
    build = release(version)
    if build is None:
        return None
    read = {number: name for name in table.known() if (number := release(name)) is not None}
    before = [number for number in read if number <= build]
    after = [number for number in read if number >= build]
    if not after:
        return None
    if not before:
        return False if table.good(change.name, read[after[0]]) is False else None
    around = {table.good(change.name, read[before[-1]]), table.good(change.name, read[after[0]])}
    return around.pop() if len(around) == 1 else None


def survey(version: str | None, seen: Mapping[str, bool]) -> list[dict[str, object]]:
    """Every change with ``contained`` (True, False, None) and ``known_by``; ``seen`` is evidence by a change's name."""
    rows: list[dict[str, object]] = []
    for change in CHANGES:
        evident = seen.get(change.name, False)
        contained = True if evident else contains(change, version)
        by = "seen" if evident else f"version {version}" if contained is not None else ""
        rows.append(
            {
                "name": change.name,
                "about": change.about,
                "reference": change.reference,
                "contained": contained,
                "known_by": by,
            }
        )
    return rows
