"""How fast recorded steps are replayed: ``python benchmarks/replay_speed.py [--steps 20000] [--policies 50]``.

Simulates a recording (a draft model that is right two times in three, requests of 256 tokens, eight at a time, budget
none), then times loading it and replaying it under many policies. Time is the processor's, of all threads: what one
core needs. ``--max`` makes it fail when the replay alone takes longer than that many seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from specgram_lab import ledger
from specgram_lab.av import tables as budget_tables
from specgram_lab.av.replay import load, replay
from specgram_lab.spec import Budget, Cell, Drafter, Engine, Workload

K, TOKENS, CONCURRENCY = 4, 256, 8


def simulate(folder: Path, steps: int, seed: int) -> None:
    """Tables of a run with ``steps`` request steps that began after every token."""
    draw = np.random.default_rng(seed)
    budget = Budget(policy="none")
    cell = Cell(
        drafter=Drafter(method="draft_model", k=K, model="simulated"),
        workload=Workload(prompts="records", concurrency=CONCURRENCY),
        engine=Engine(runner="v2", budget=budget),
    )
    requests, rows, proposals = [], [], []
    for number in range(-(-steps // TOKENS)):
        text = draw.integers(0, 49152, TOKENS)
        said = np.where(draw.random(TOKENS + K) < 2 / 3, np.append(text, np.zeros(K, int)), -2)
        requests.append({"request_id": str(number), "prompt_tokens": 60, "token_ids": text.tolist()})
        for at in range(TOKENS):
            draft = said[at : at + K].tolist() if at else []
            row = {"step": at, "request_id": str(number), "request_step": at, "in_reasoning": False, "judged": False}
            row |= {"drafted": len(draft), "grammar_valid": len(draft), "scheduled": len(draft), "struck": 0}
            row |= {"verified": 0, "padded": 0, "av_skipped": len(draft), "accepted": 0, "sampled": 1, "committed": 1}
            rows.append(row | {"draft_token_ids": draft, "sampled_token_ids": [int(text[at])]})
            if at:
                confidences = draw.uniform(0.3, 1.0, K).tolist()
                proposals.append({"step": at - 1, "request_id": str(number), "confidences": confidences})
    run: dict[str, Any] = {"outcome": "ok", "scheduling_effective": "sync", "config_requested": cell.canonical()}
    run["config_effective"] = json.dumps({"max_num_batched_tokens": 2048})
    for name, content in (("runs", [run]), ("requests", requests), ("steps", rows)):
        ledger.write_table(folder, name, ledger.frame(name, [row | {"run_id": cell.cell_id} for row in content]))
    budget_tables.write(folder, cell.cell_id, [], proposals)


def policies(count: int) -> list[Budget]:
    """Half of them vLLM's argmax under as many cost curves, the rest fixed, per request and fractions."""
    found = [Budget(policy="native", verify_cost=(1.0, float(b))) for b in np.geomspace(0.01, 2, count // 2)]
    rest = count - len(found)
    found += [Budget(policy="fixed", value=float(n)) for n in range(rest // 2)]
    return found + [Budget(policy="fraction", value=n / rest) for n in range(count - len(found))]


def main() -> int:
    """Simulate, load, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--policies", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max", type=float, help="fail above this many seconds")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        simulate(Path(name), given.steps, given.seed)
        begin = time.process_time()
        recording = load([Path(name)])
        loading = time.process_time() - begin
    steps = int(recording.lengths.sum())
    times, totals = [], None
    for _ in range(given.repeats):
        begin = time.process_time()
        totals = replay(recording, policies(given.policies)).totals
        times.append(time.process_time() - begin)
    assert totals is not None
    refused = int((totals["refused"] != "").sum())
    worst = max(times)
    print(
        f"{steps} recorded steps, {given.policies} policies: loading {loading:.2f} s, replay {np.median(times):.2f} s"
        f" ({min(times):.2f} to {worst:.2f} in {given.repeats}), at most {int(totals['engine_steps'].max())} engine"
        f" steps, {refused} refused"
    )
    return int(refused > 0 or (given.max is not None and worst > given.max))


if __name__ == "__main__":
    sys.exit(main())
