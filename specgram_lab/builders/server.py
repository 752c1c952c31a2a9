"""A running server as the engine of a cell: its answers become requests, its counters columns of the run.

What cannot be seen from outside stays empty: steps, token ids, runner, scheduling, device. Imports no vLLM.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specgram_lab import __version__, grammars, ledger, provenance, workloads
from specgram_lab.handover import PROGRESS
from specgram_lab.servers import check as checking
from specgram_lab.servers import client, verdict
from specgram_lab.servers.address import parse_address
from specgram_lab.servers.answers import Answer, Outcome
from specgram_lab.servers.asking import Ask, ask
from specgram_lab.servers.check import Seen
from specgram_lab.servers.judging import FINISH, Judged
from specgram_lab.spec import Cell

LOOKS_S = 4 * checking.PROBE_S
"""Of the cell's time limit, seconds kept for looking at models and metrics, for judging and for writing."""
ANSWERED: Mapping[Outcome, str] = {Outcome.REFUSED: "rejected", Outcome.SERVER_ERROR: "error"}
"""Outcomes that are the server's word on a request, with the ledger's reason; the others mean that none came."""
_REPORTED = {
    "reported_spec_steps": "num_spec_steps", "reported_drafted": "num_draft_tokens",
    "reported_accepted": "num_accepted_draft_tokens", "reported_step_drafted": "per_step_drafted",
    "reported_step_accepted": "per_step_accepted",
}  # fmt: skip


def run(cell: Cell, folder: Path, report: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Check the server with the cell's prompts; write its tables, fill ``report`` as `specgram_lab.cell` does.

    Raises:
        SpecError, LogError: an address or a log that is none.
    """
    assert cell.engine.url is not None
    asks = [_ask(number, prompt, cell) for number, prompt in enumerate(workloads.load(cell.workload))]
    report["prompts"] = len(asks)
    total = max(cell.limits.timeout_s / 2, cell.limits.timeout_s - LOOKS_S)
    limits = client.Limits(concurrency=cell.workload.concurrency, timeout_s=total, total_s=total)
    progress = folder / PROGRESS
    ended = 0

    def answered(answer: Answer) -> None:
        nonlocal ended
        ended += 1
        progress.write_text(f"{ended}/{len(asks)}", encoding="utf-8")

    begin = time.monotonic()
    log_file = Path(cell.engine.log) if cell.engine.log is not None else None
    seen = checking.check(
        parse_address(cell.engine.url, environ), asks, model=cell.target.model, log_file=log_file, limits=limits,
        answered=answered,
    )  # fmt: skip
    ledger.write_table(folder, "requests", ledger.frame("requests", [_row(cell.cell_id, item) for item in seen.judged]))
    if seen.log is not None:
        ledger.write_table(folder, "fsm_events", ledger.frame("fsm_events", _events(cell.cell_id, seen)))
    report["generate_s"] = seen.sending_s if seen.sending_s else time.monotonic() - begin
    tokens = [item.answer.output_tokens for item in seen.judged if item.answer.output_tokens is not None]
    report["output_tokens"] = sum(tokens) if tokens else None
    report["outcome"], report["reason"], report["partial"] = _outcome(seen)
    report["columns"] = _columns(cell, seen)
    report["provenance"] = {
        "lab": {"version": __version__, **provenance.commit()},
        "packages": {"openai": version("openai")},
        "python": platform.python_version(),
        "server": {"url": seen.address.root, "vllm": seen.version, "fingerprints": _fingerprints(seen)},
        "model": {},
        "seeds": {"workload": cell.workload.seed},
    }


def _ask(number: int, prompt: workloads.Prompt, cell: Cell) -> Ask:
    grammar = None if cell.grammar.kind == "none" and prompt.tools else cell.grammar
    return ask(number, prompt, cell.workload, grammar)


def _row(run_id: str, item: Judged) -> dict[str, Any]:
    answer, found = item.answer, item.verdict
    row: dict[str, Any] = {
        "run_id": run_id, "request_id": answer.ask.request_id, "prompt_id": answer.ask.prompt_id,
        "repeat": answer.ask.repeat, "prompt_tokens": answer.prompt_tokens, "output_tokens": answer.output_tokens,
    }  # fmt: skip
    if answer.outcome is not Outcome.OK:
        return row | {"finish_reason": ANSWERED.get(answer.outcome), "class_detail": answer.message}
    text = "\n".join(call.arguments for call in answer.calls) or answer.text
    row |= {
        "finish_reason": FINISH.get(answer.finish_reason or "", answer.finish_reason),
        "text": grammars.escape_surrogates(text),
    }
    if found is not None and (answer.ask.tools or answer.ask.grammar.kind != "none"):
        row |= {"output_class": found.kind.value, "class_detail": found.detail, "class_position": found.position}
    metrics = answer.spec_metrics or {}
    return row | {column: metrics.get(name) for column, name in _REPORTED.items()}


def _events(run_id: str, seen: Seen) -> list[dict[str, Any]]:
    """Refusals of the log under the lab's own request ids; other clients' requests keep the server's."""
    assert seen.log is not None
    own = {item.answer.server_id: item.answer.ask.request_id for item in seen.judged if item.answer.server_id}
    rows = []
    for event in seen.log.events:
        name = event.request_id or ""
        mine = next((number for server_id, number in own.items() if name.startswith(server_id)), event.request_id)
        row = {"run_id": run_id, "request_id": mine, "phase": event.kind.phase, "message": event.record.message}
        rows.append(row | {"token_ids": list(event.token_ids)})
    return rows


def _outcome(seen: Seen) -> tuple[str, str, bool]:
    """Outcome, reason, and whether requests are missing."""
    if seen.broken:
        kind = "unsupported" if seen.broken[0].startswith("the server has no model") else "engine_failed"
        return kind, seen.broken[0], True
    known = {Outcome.OK, *ANSWERED}
    lost = [item.answer for item in seen.judged if item.answer.outcome not in known]
    if lost:
        first = f"{lost[0].outcome.value}: {lost[0].message}"
        reason = f"{len(lost)} of {len(seen.judged)} requests had no answer, the first: {first}"
        kind = (
            "timeout"
            if all(answer.outcome in (Outcome.TIMEOUT, Outcome.NOT_SENT) for answer in lost)
            else "engine_failed"
        )
        return kind, reason, True
    refused = [item.answer for item in seen.judged if item.answer.outcome is Outcome.REFUSED]
    if len(refused) == len(seen.judged):
        return "rejected_request", refused[0].message, False
    if not any(item.answer.output_tokens or item.answer.text or item.answer.calls for item in seen.judged):
        return "no_data", "the server gave no token", False
    return "ok", "", False


def _columns(cell: Cell, seen: Seen) -> dict[str, Any]:
    """Columns of the run's row that only a server's own words can fill; None where it does not say."""
    total = seen.counted.total if seen.counted is not None else None
    counters = total if total is not None and total.drafts is not None else None
    depths = {
        m["num_spec_tokens"] for item in seen.judged if (m := item.answer.spec_metrics) and "num_spec_tokens" in m
    }
    effective = {"vllm": seen.version, "model": seen.model, "k": min(depths) if len(depths) == 1 else None}
    warnings = [
        f"asked for k={cell.drafter.k}, the server's answers say {k}" for k in sorted(depths) if k != cell.drafter.k
    ]
    if seen.others > 0:
        warnings.append(f"{seen.others} requests of other clients ended meanwhile and are in the counters too")
    semantics = None
    if counters is not None:
        semantics = "rfc" if counters.verified_tokens is not None else "pre-64156"
    return {
        "config_effective": json.dumps(effective, sort_keys=True),
        "engine_num_drafts": counters.drafts if counters else None,
        "engine_draft_tokens": counters.draft_tokens if counters else None,
        "engine_accepted_tokens": counters.accepted_tokens if counters else None,
        "engine_semantics": semantics,
        "warnings": [*warnings, *(note for note in verdict.problems(seen) if not seen.broken)],
    }


def _fingerprints(seen: Seen) -> list[str]:
    return sorted({item.answer.fingerprint for item in seen.judged if item.answer.fingerprint})
