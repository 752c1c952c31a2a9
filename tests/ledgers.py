"""Small synthetic ledgers: one step from its few free numbers, and whole runs from simulated drafters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from specgram_lab import ledger


def step(
    *,
    drafted: int = 4,
    valid: int | None = None,
    accepted: int = 0,
    scheduling: str = "async",
    admitted: int | None = None,
    slots: int | None = None,
    judged: bool = True,
    sampled: int | None = None,
    **other: Any,
) -> dict[str, Any]:
    """One row of ``steps`` as vLLM 0.28-0.33 would leave it.

    ``valid`` drafts pass the grammar (all by default), ``slots`` is the most that the scheduler has room for,
    ``admitted`` is what adaptive verification lets through. Sync cuts the draft before it is scheduled, async
    strikes what is invalid afterwards.
    """
    valid = drafted if valid is None else valid
    room = drafted if slots is None else slots
    scheduled = min(valid, room) if scheduling == "sync" else room
    padded = max(scheduled - drafted, 0)
    real = scheduled - padded
    verified = real if admitted is None else min(admitted, real)
    struck = scheduled - min(valid, scheduled) if scheduling == "async" and judged else 0
    sampled = accepted + 1 if sampled is None else sampled
    return {
        "run_id": "run", "step": 0, "request_id": "0", "request_step": 1, "in_reasoning": False, "judged": judged,
        "drafted": drafted, "grammar_valid": valid, "scheduled": scheduled, "struck": struck, "verified": verified,
        "padded": padded, "av_skipped": real - verified, "accepted": accepted, "sampled": sampled,
        "committed": sampled, "draft_token_ids": list(range(drafted)), "sampled_token_ids": list(range(sampled)),
    } | other  # fmt: skip


def steps_frame(*rows: dict[str, Any]) -> pd.DataFrame:
    """A checked ``steps`` frame; rows that do not say otherwise follow each other in one request."""
    numbered = [row | {"step": row["step"] or number} for number, row in enumerate(rows)]
    frame = ledger.frame("steps", numbered)
    ledger.check_steps(frame)
    return frame


def run_row(**values: Any) -> dict[str, Any]:
    """One row of ``runs``."""
    return {
        "run_id": "run", "outcome": "ok", "partial": False, "engine": "scripted", "device": "cpu",
        "drafter": "scripted", "k": 4, "grammar": "json_object", "grammar_kind": "json_object", "workload": "prompts",
        "concurrency": 4, "runner_requested": "v1", "runner_effective": "v1", "scheduling_requested": "sync",
        "scheduling_effective": "sync", "budget_requested": "off", "budget_effective": "off", "warnings": [],
        "engine_semantics": "pre-64156", "prompts": 1,
    } | values  # fmt: skip


def simulate(
    run_id: str,
    *,
    drafter: str = "draft_model",
    k: int = 4,
    grammar: str = "json_schema",
    scheduling: str = "sync",
    requests: int = 8,
    steps: int = 20,
    keep: float = 0.75,
    legal: float = 0.9,
    admitted: int | None = None,
    seed: int = 0,
    **run: Any,
) -> dict[str, pd.DataFrame]:
    """All four tables of a run whose every draft token is legal with chance ``legal`` and kept with chance ``keep``.

    A grammar ``none`` judges nothing; drafter ``none`` drafts nothing; ``ngram`` proposes 0 to k tokens. Requests
    differ in ``keep``, so that tokens of one request are alike.
    """
    rng = np.random.default_rng(seed)
    rows, events, request_rows = [], [], []
    for number in range(requests):
        own_keep = float(np.clip(keep + rng.normal(0, 0.1), 0.02, 0.98))
        output = 0
        for at in range(steps):
            drafted = 0 if drafter == "none" or at == 0 else int(rng.integers(0, k + 1)) if drafter == "ngram" else k
            judged = grammar != "none"
            valid = _run_length(rng, drafted, legal) if judged else drafted
            slots = k if scheduling == "async" and drafter == "draft_model" and drafted else None
            row = step(
                drafted=drafted, valid=valid, scheduling=scheduling, judged=judged, slots=slots, admitted=admitted,
                run_id=run_id, request_id=str(number), step=at, request_step=at,
            )  # fmt: skip
            kept = _run_length(rng, min(valid, row["verified"]), own_keep)
            row |= {"accepted": kept, "sampled": kept + 1, "committed": kept + 1}
            row["sampled_token_ids"] = list(range(kept + 1))
            rows.append(row)
            output += kept + 1
            if judged and valid < drafted and rng.random() < 0.4:
                events.append({
                    "run_id": run_id, "step": at, "request_id": str(number), "phase": "draft-probe",
                    "token_ids": [271], "token_text": "\\n\\n", "message": "Failed to advance FSM",
                })  # fmt: skip
        request_rows.append({
            "run_id": run_id, "request_id": str(number), "prompt_id": f"p{number}", "repeat": 0,
            "output_tokens": output, "finish_reason": "stop", "output_class": "valid" if grammar != "none" else None,
        })  # fmt: skip
    row = run_row(
        run_id=run_id, drafter=drafter, k=0 if drafter == "none" else k, grammar=grammar, grammar_kind=grammar,
        scheduling_requested=scheduling, scheduling_effective=scheduling, prompts=requests,
        output_tokens=sum(r["output_tokens"] for r in request_rows), generate_s=2.0,
    )  # fmt: skip
    tables = {"runs": [row | run], "requests": request_rows, "steps": rows, "fsm_events": events}
    made = {name: ledger.frame(name, content) for name, content in tables.items()}
    ledger.check_steps(made["steps"])
    return made


def together(*ledgers: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Several runs as one collected ledger."""
    return {name: pd.concat([one[name] for one in ledgers], ignore_index=True) for name in ledger.TABLES}


def _run_length(rng: np.random.Generator, most: int, chance: float) -> int:
    """How many of ``most`` trials succeed before the first that fails."""
    failed = np.flatnonzero(rng.random(most) >= chance)
    return int(failed[0]) if failed.size else most
