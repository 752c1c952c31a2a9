"""Coverage of the intervals on a real engine with planted acceptance: ``python benchmarks/calibration.py``.

Prints a table and writes ``coverage.csv``, with the ledger of every run beside it, into the folder of ``--out``.
Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specgram_lab import calibration, lab


def main() -> int:
    """Run, estimate, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2")
    parser.add_argument("--seed", type=int, default=7, help="of the bootstrap")
    parser.add_argument("--out", type=Path, default=Path("results/calibration"))
    given = parser.parse_args()
    cells = calibration.cells(given.runs, requests=given.requests, engine={"runner": given.runner})
    results = lab.run(cells, given.out)
    if not results.failed.empty:
        print(results.failed[["run_id", "outcome", "reason"]].to_string(), file=sys.stderr)
        return 1
    table = calibration.coverage(calibration.estimates(results.steps, seed=given.seed), calibration.RATES)
    table.to_csv(given.out / "coverage.csv", index=False)
    print(calibration.to_text(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
