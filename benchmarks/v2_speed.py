"""Model Runner V2 on a CPU: against V1, native kernels against interpreted ones, and what the recorder costs.

``python benchmarks/v2_speed.py [--json] [--pairs N] [--dspark FOLDER]``. Every comparison is a series of pairs in one
go: both engines are there, passes alternate, the first of each is thrown away. Ratios of speed (tokens a second) for
``v2_over_v1`` and ``native_over_interpreted``; ``recorder_overhead`` is the time of the steps with the recorder over
that of the same steps without, on one engine (twice as many pairs), and ``own_share`` the share
of a pass in the recorder's own code by cProfile. Time is the processor's, which does not see what else the machine
does; the ratio of speeds by the clock stands under ``clock``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any

import numpy as np
from pairs import Worker, against, pooled, step_ratio

from specgram_lab.spec import Cell, parse_cell

DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "k": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model", "model": "target", "k": 3},
}


def cell(drafter: dict[str, Any], runner: str, requests: int, tokens: int = 64, **engine: Any) -> Cell:
    """``requests`` prompts for records at once, greedy, under json_object."""
    return parse_cell(
        {
            "drafter": drafter,
            "grammar": {"kind": "json_object"},
            "workload": {"prompts": "records", "limit": requests, "concurrency": requests, "max_tokens": tokens},
            "engine": {"runner": runner, "record": False, **engine},
        }
    )


def overhead(worker: Worker, pairs: int) -> dict[str, Any]:
    """Time of the steps with the recorder over the time of the same steps without it.

    Both passes of a pair decode the same tokens in the same steps. A step's time is its median over the passes of its
    side, which a disturbance of some passes does not move; the interval is a bootstrap over the pairs.
    """
    worker.run(), worker.run(record=True)
    passes: list[dict[bool, list[float]]] = []
    texts = set()
    for number in range(pairs):
        pair = {}
        for record in (True, False)[:: 1 if number % 2 else -1]:
            one = worker.run(record=record)
            pair[record] = one["step_cpu_seconds"]
            texts.add(one["texts"])
        passes.append(pair)
    steps = Counter(len(seen) for pair in passes for seen in pair.values()).most_common(1)[0][0]
    # A request whose grammar was compiled a moment later joins a step later: such a pass has other steps.
    kept = [pair for pair in passes if len(pair[True]) == len(pair[False]) == steps]
    recorded, bare = (np.asarray([pair[record] for pair in kept]) for record in (True, False))
    result: dict[str, Any] = step_ratio(recorded, bare) | {"pairs": len(kept), "steps": steps}
    result |= {"same_texts": len(texts) == 1}
    return result | {"own_share": worker.run(record=True, cprofile=True)["recorder_share"]}


def shares(worker: Worker) -> dict[str, float]:
    """Share of a pass in each part of a step, the recorder on, and the time of a step."""
    one = worker.run(record=True, profile=True)
    found = {name: value / one["seconds"] for name, value in one["parts"].items()}
    return found | {"rest": 1 - sum(found.values()), "step_ms": 1000 * one["seconds"] / one["steps"]}


def measure(pairs: int, dspark: str | None, only: str) -> dict[str, Any]:
    """All of it; progress goes to stderr."""
    report: dict[str, Any] = {
        "v2_over_v1": {},
        "native_over_interpreted": {},
        "recorder_overhead": {},
        "step_shares": {},
    }
    for name, drafter in DRAFTERS.items():
        for requests in (1, 8):
            label = f"{name}, {_many(requests)}"
            if only not in label:
                continue
            with Worker(cell(drafter, "v1", requests)) as v1, Worker(cell(drafter, "v2", requests)) as v2:
                report["v2_over_v1"][label] = against(v2, v1, pairs)
                for runner, worker in (("v1", v1), ("v2", v2)):
                    report["recorder_overhead"][f"{runner}, {label}"] = overhead(worker, 2 * pairs)
                    report["step_shares"][f"{runner}, {label}"] = shares(worker)
            print(label, report["v2_over_v1"][label], file=sys.stderr, flush=True)
    costs = [found["ratio"] for found in report["recorder_overhead"].values()]
    if len(costs) > 1:
        report["recorder_overhead"]["all cases together"] = pooled(costs)
    drafter = {"method": "dspark", "model": dspark, "k": 5} if dspark else DRAFTERS["draft_model"]
    for requests in (1, 8):
        asked = cell(drafter, "v2", requests, tokens=24)
        label = f"{drafter['method']}, {_many(requests)}"
        if only not in label:
            continue
        with Worker(asked) as native, Worker(asked, {"v2-on-cpu": {"native": False}}) as interpreted:
            report["native_over_interpreted"][label] = against(native, interpreted, max(3, pairs // 3))
            report["step_shares"][f"v2, {label}"] = shares(native)
        print(label, report["native_over_interpreted"][label], file=sys.stderr, flush=True)
    return report


def _many(requests: int) -> str:
    return f"{requests} request{'s' if requests > 1 else ''}"


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of passes per comparison")
    parser.add_argument("--dspark", help="folder of a DSpark drafter; without one the target drafts for itself")
    parser.add_argument("--only", default="", help="cases whose label contains this")
    given = parser.parse_args()
    report = measure(given.pairs, given.dspark, given.only)
    if given.json:
        print(json.dumps(report, indent=1))
        return
    for part, cases in report.items():
        print(part)
        for label, found in cases.items():
            text = ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
            print(f"  {label}: {text}")


if __name__ == "__main__":
    main()
