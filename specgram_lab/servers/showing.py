"""Reports of the log and metrics readers for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def log_text(content: Mapping[str, Any]) -> str:
    """`log.to_dict` as text."""
    events = content["fsm_events"]
    engine = content["engine"]
    lines = [f"{content['lines']} lines, {content['bytes'] / 1e6:.1f} MB"]
    if engine:
        lines.append("engine       " + ", ".join(f"{key} {value}" for key, value in engine.items()))
    lines.append(
        f"FSM events   {events['draft-probe']} draft-probe (harmless), {events['commit']} commit, of"
        f" {events['requests']} requests; {events['unconfirmed']} draft-probes by the absence of a termination"
    )
    lines.append(f"died         {events['terminated_requests']} requests")
    if events["guidance"]:
        lines.append(f"guidance     {events['guidance']} of the events in guidance's own words")
    if events["tokens"]:
        lines.append("tokens       " + ", ".join(f"{t['token_id']} ({t['count']}x)" for t in events["tokens"]))
    for definition, found in (content["acceptance"] or {}).items():
        what = (
            f"{found['lines']} intervals added"
            if definition == "v1"
            else f"last of {found['engines']} engines, cumulative"
        )
        lines.append(
            f"acceptance   {_percent(found['acceptance_rate'])}"
            f" (accepted {found['accepted']}, drafted {found['drafted']};"
            f" definition {definition}, {what})"
        )
    failures = content["engine_failures"]
    if failures["lines"]:
        lines.append(f"failures     {failures['lines']} lines, first: {' '.join(failures['first'][0].split())[:160]}")
    lines += [f"note: {note}" for note in content["notes"]]
    if content["events"]:
        lines += ["", "first events:"]
        lines += [f"  {_event(event)}" for event in content["events"]]
    return "\n".join(lines)


def metrics_text(content: Mapping[str, Any]) -> str:
    """`metrics.to_dict` as text."""
    lines = []
    rows = [(_labels(engine["labels"]), engine) for engine in content["engines"]]
    if content["total"] is not None and len(rows) > 1:
        rows.append(("all engines", content["total"]))
    for name, found in rows:
        lines.append(name)
        counts = [f"{key} {found[key]}" for key in _COUNTS if key in found]
        lines.append("  " + ", ".join(counts))
        if content["definition"] == "v1":
            length = found["mean_acceptance_length"]
            lines.append(
                f"  acceptance {_percent(found['acceptance_rate'])} of drafted,"
                f" mean acceptance length {f'{length:.3f}' if length is not None else 'n/a'}"
            )
        if found["per_position_rates"]:
            lines.append("  per position " + ", ".join(f"{rate:.3f}" for rate in found["per_position_rates"]))
    for gauge in content["gauges"]:
        renamed = f" (now {gauge['now_called']})" if "now_called" in gauge else ""
        lines.append(f"{gauge['name']}{renamed} {_labels(gauge['labels'])}: {gauge['value']:g}")
    lines += [f"WRONG: {breach}" for breach in content["breaches"]]
    lines += [f"note: {note}" for note in content["notes"]]
    if content["promql"]:
        lines += ["", *(f"PromQL, {name}: {query}" for name, query in content["promql"].items())]
    return "\n".join(lines)


_COUNTS = ("drafts", "draft_tokens", "accepted_tokens", "verified_tokens", "emitted_tokens", "generation_tokens")


def _percent(rate: float | None) -> str:
    return "n/a" if rate is None else f"{rate:.1%}"


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in labels.items()) or "no labels"


def _event(event: Mapping[str, Any]) -> str:
    who = f"{event['process']} pid {event['pid']}" if event["process"] else "no process name"
    tokens = ", ".join(map(str, event["token_ids"])) or "?"
    return f"{event['time'] or '':15}{event['phase']:12} request {event['request_id'] or '?'} token {tokens} ({who})"
