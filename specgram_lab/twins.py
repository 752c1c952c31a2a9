"""Runs and their twins without a drafter: greedy speculation must give the same text."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd


def _asked(config: str) -> str:
    """What two runs must share to be twins: all but drafter, budget, scheduling and what was switched on."""
    content = json.loads(config)
    content.pop("drafter")
    for name in ("budget", "scheduling", "patches", "record"):
        content["engine"].pop(name)
    return json.dumps(content, sort_keys=True)


def diverged(runs: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """Outputs of greedy runs that differ from those of the twin without a drafter.

    Args:
        runs: the ledger's ``runs``; a run's twin is the one of the same runner, target, grammar and workload with
            drafter none. Runs without a twin, or sampled at a temperature, have no rows.
        requests: the ledger's ``requests``.

    Returns:
        One row a request: run_id, request_id, twin (its run_id), ``diverged`` (bool), ``token`` (the first output
        token that differs, from 0; NA where none does). A tie within the arithmetic of bfloat16 also shows here: more
        tokens in one forward pass mean another order of additions.
    """
    known = [
        run for run in runs.to_dict("records") if run["outcome"] == "ok" and isinstance(run["config_requested"], str)
    ]
    greedy = [run for run in known if json.loads(run["config_requested"])["workload"]["temperature"] == 0]
    twins = {_asked(run["config_requested"]): run["run_id"] for run in greedy if run["drafter"] == "none"}
    outputs: dict[Any, dict[Any, Any]] = {}
    for request in requests.to_dict("records"):
        if request["token_ids"] is not None:
            outputs.setdefault(request["run_id"], {})[request["request_id"]] = list(request["token_ids"])
    rows = []
    for run in greedy:
        twin = twins.get(_asked(run["config_requested"])) if run["drafter"] != "none" else None
        theirs = outputs.get(twin, {})
        for request_id, tokens in outputs.get(run["run_id"], {}).items():
            if request_id in theirs:
                token = _first_difference(tokens, theirs[request_id])
                rows.append((run["run_id"], request_id, twin, token is not None, token))
    frame = pd.DataFrame(rows, columns=["run_id", "request_id", "twin", "diverged", "token"])
    return frame.astype({"diverged": "boolean", "token": "Int32"})


def _first_difference(one: list[int], other: list[int]) -> int | None:
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
