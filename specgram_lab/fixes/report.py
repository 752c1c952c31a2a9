"""What a build contains and what follows, as plain data and as text; the most important line first."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any, Final

from specgram_lab.fixes import consequences
from specgram_lab.fixes.catalog import FIXES, REPORTS, examine
from specgram_lab.fixes.configuration import Configuration
from specgram_lab.fixes.finding import STATES
from specgram_lab.fixes.setting import Setting
from specgram_lab.fixes.source import Source

WIDTH: Final = 118
WORDS: Final = {
    "contained": "contained", "replaced": "replaced by other code that does it", "removed": "nothing left to mend",
    "partial": "in part", "missing": "missing", "no-feature": "without the feature", "unknown": "cannot be told",
}  # fmt: skip
"""The states, for readers."""


def of_build(source: Source, configuration: Configuration | None = None) -> dict[str, Any]:
    """The whole report on one build; without a configuration, on what could follow for some."""
    findings = examine(source)
    setting = Setting(configuration or Configuration(), source, findings)
    found = consequences.following(setting) if configuration else consequences.possible(setting)
    given = None
    if configuration is not None:
        given = asdict(configuration) | {"text": configuration.summary(), "taken": setting.taken()}
    return {
        "build": {
            "label": source.label, "distribution": source.distribution, "version": source.version,
            "place": source.place,
        },
        "configuration": given,
        "consequences": [asdict(item) | {"do": item.do} for item in found],
        "reports": {
            name: {"about": about, "through": [item.fix for item in found if item.report == name]}
            for name, about in REPORTS.items()
        },
        "fixes": [
            {"name": fix.name, "about": fix.about, "reference": fix.reference, "reports": list(fix.reports)}
            | asdict(findings[fix.name])
            for fix in FIXES
        ],
    }  # fmt: skip


def to_text(report: dict[str, Any]) -> str:
    """`of_build` for a terminal."""
    lines = _for_server(report) if report["configuration"] else _for_anybody(report)
    lines += ["", "fixes, told from the code:"]
    for state in STATES:
        named = [f"{fix['name']} ({fix['reference']})" for fix in report["fixes"] if fix["state"] == state]
        lines += [_wrapped(f"{WORDS[state]}: {', '.join(named)}", 2)] if named else []
    return "\n".join(lines)


def _for_server(report: dict[str, Any]) -> list[str]:
    given, found, label = report["configuration"], report["consequences"], report["build"]["label"]
    kinds = ", ".join(dict.fromkeys(item["kind"] for item in found))
    lines = [f"{label}: " + (f"{len(found)} to know ({kinds})" if found else "nothing follows for this server")]
    lines += [_wrapped(f"read: {given['text']}", 2), _wrapped(f"taken: {given['taken']}", 2)]
    lines += [_wrapped(f"note: {note}", 2) for note in given["notes"]]
    for item in found:
        lines += ["", _wrapped(f"{item['kind'].upper()}: {item['says']} ({_references(item)})", 0)]
        lines += [_wrapped(f"you see: {item['see']}", 2), _wrapped(f"to do: {item['do']}", 2)]
    silent = [name for name, content in report["reports"].items() if not content["through"]]
    return [*lines, "", f"nothing follows from {', '.join(silent)}"] if silent and found else lines


def _for_anybody(report: dict[str, Any]) -> list[str]:
    found, reports = report["consequences"], report["reports"]
    met = ", ".join(name for name, content in reports.items() if content["through"]) or "none"
    unmet = ", ".join(name for name, content in reports.items() if not content["through"]) or "none"
    lines = [f"{report['build']['label']}: of the five reports {met} can be met on this build; {unmet} cannot"]
    lines += [f"  {name}  {content['about']}" for name, content in reports.items()]
    lines += ["", "what can happen, the worst first:"] if found else []
    for item in found:
        mended = f"mended in {item['upgrade']}" if item["upgrade"] else "mended in no release so far"
        if not item["upgrade"] and item["upgrade_cuda"]:
            mended = f"mended in {item['upgrade_cuda']}, for CUDA"
        lines.append(
            _wrapped(f"{item['kind']}, with {item['when']}: {item['says']} ({_references(item)}, {mended})", 2)
        )
    return [*lines, "", "for a server of yours: specgram doctor --server-command 'vllm serve ...' (or a file with it)"]


def _references(item: dict[str, Any]) -> str:
    return ", ".join(part for part in (item["report"], item["reference"]) if part)


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
