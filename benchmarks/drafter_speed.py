"""What a trained drafter gains: tokens a second with it over tokens a second without a drafter, pair by pair.

``python benchmarks/drafter_speed.py [NAME...] [--json] [--pairs N] [--prompts N]``. One request at a time, greedy,
Model Runner V2, held-out prompts under their JSON schemas. Both engines are there, passes over the prompts alternate,
the first of each is thrown away; time is the processor's, by the clock under ``clock``. ``same_texts`` says whether
both wrote the same in every pass: where two tokens are as likely within bf16, they need not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from pairs import Worker, against

from specgram_lab.drafters import data, evaluate, pairs
from specgram_lab.spec import Cell, parse_cell


def cells(name: str, folder: Path, prompts: int, max_tokens: int) -> tuple[Cell, Cell]:
    """With the drafter and without one, on the same target."""
    asked = evaluate.cells(name, folder, prompts, record=False, budget={"policy": "off"})["json_schema"]
    workload = asked.workload.model_copy(update={"concurrency": 1, "max_tokens": max_tokens})
    drafted = parse_cell(asked.model_dump(mode="json") | {"workload": workload.model_dump(mode="json")})
    return drafted, evaluate.without(drafted)


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="trained drafters; all that are there without one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of passes per drafter")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts a pass")
    parser.add_argument("--max-tokens", type=int, default=data.MAX_TOKENS)
    given = parser.parse_args()
    report: dict[str, Any] = {}
    for name in evaluate.chosen(given.names):
        with tempfile.TemporaryDirectory() as folder:
            drafted, plain = cells(name, Path(folder), given.prompts, given.max_tokens)
            with Worker(drafted) as first, Worker(plain) as second:
                report[name] = against(first, second, given.pairs) | {"k": pairs.parts(name)["drafter"]["k"]}
        one = report[name]
        print(
            f"{name}, k {one['k']}: {one['ratio']:.2f} [{one['low']:.2f}, {one['high']:.2f}] times the tokens a second "
            f"of no drafter, {one['clock']['ratio']:.2f} by the clock, {one['pairs']} pairs",
            file=sys.stderr if given.json else sys.stdout,
            flush=True,
        )
    if given.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
