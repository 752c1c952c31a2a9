"""The page of a batch: what ran, what it made, what failed and why. Static HTML, no script, nothing fetched."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specgram_lab import ledger

PAGE = "index.html"
NOT_RUN = "not run yet"
STYLE = (
    "body{font:15px/1.45 sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:.35em .7em;"
    "border-bottom:1px solid #ddd}code,pre{font-size:13px}pre{white-space:pre-wrap;margin:0}"
    ".ok{color:#1b6e2e}.bad{color:#a11;font-weight:bold}img{max-width:20em;max-height:14em;margin:.3em}"
)


@dataclass(frozen=True)
class Made:
    """An entry of a batch and what became of it; ``seen`` are the parameters that the notebook really had."""

    notebook: str
    set_name: str
    parameters: dict[str, Any]
    folder: Path
    outcome: str
    reason: str
    seconds: float
    seen: dict[str, Any]


def write(out: Path, name: str, made: Sequence[Made]) -> Path:
    """Write the page (tmp, then rename)."""
    counts = Counter(one.outcome for one in made)
    shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    failed = [one for one in made if one.outcome not in ("ok", NOT_RUN)]
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(name)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(name)}</h1><p>{len(made)} notebooks: {escape(shown)}</p>",
    ]  # fmt: skip
    if failed:
        parts += ["<h2>Failed</h2><ul>"]
        parts += [
            f'<li><a href="#{quote(one.folder.name)}">{escape(one.notebook)}, {escape(one.set_name)}</a>:'
            f' <span class="bad">{escape(one.outcome)}</span> {escape(one.reason)}</li>'
            for one in failed
        ]
        parts += ["</ul>"]
    parts += ["<h2>All</h2><table><tr><th>notebook</th><th>parameters</th><th>outcome</th><th>made</th></tr>"]
    parts += [_row(one) for one in made]
    parts += ["</table></body></html>"]
    path, part = out / PAGE, out / f".{PAGE}.tmp"
    part.write_text("\n".join(parts), encoding="utf-8")
    part.replace(path)
    return path


def _row(one: Made) -> str:
    look = "ok" if one.outcome == "ok" else "bad"
    given = escape(json.dumps(one.parameters, indent=1, ensure_ascii=False)) if one.parameters else "defaults"
    seconds = f"<br>{one.seconds:.0f} s" if one.seconds else ""
    cells = [f"<br>{escape(line)}" for line in _cells(one.folder)]
    return (
        f'<tr id="{quote(one.folder.name)}"><td>{escape(one.notebook)}<br>{escape(one.set_name)}</td>'
        f"<td><pre>{given}</pre></td>"
        f'<td><span class="{look}">{escape(one.outcome)}</span> {escape(one.reason)}{seconds}{"".join(cells)}</td>'
        f"<td>{_links(one.folder)}</td></tr>"
    )


def _links(folder: Path) -> str:
    """Links to the copy, the log and the tables, and the figures themselves."""
    kinds = (".ipynb", ".log", ".parquet", ".csv", ".md", ".json")
    paths = sorted(folder.glob("*")) if folder.is_dir() else []
    files = [path for kind in kinds for path in paths if path.suffix == kind and not path.name.startswith(".")]
    links = [f'<a href="{_address(path)}">{escape(path.name)}</a>' for path in files]
    figures = [
        f'<a href="{_address(path)}"><img src="{_address(path)}" alt="{escape(path.stem)}"></a>'
        for path in paths
        if path.suffix == ".svg" or (path.suffix == ".png" and not path.with_suffix(".svg").is_file())
    ]
    return "<br>".join(links) + "<br>" + "".join(figures)


def _address(path: Path) -> str:
    return f"{quote(path.parent.name)}/{quote(path.name)}"


def _cells(folder: Path) -> list[str]:
    """The cells that did not end well, by outcome and reason."""
    runs = ledger.read_table(folder, "runs")
    bad = runs[runs["outcome"] != "ok"]
    found = Counter(zip(bad["outcome"], bad["reason"].fillna(""), strict=True))
    return [f"{count} of {len(runs)} cells: {kind}: {reason}" for (kind, reason), count in found.most_common()]
