"""Paired measurement: two engines side by side, passes in turn, the ratio pair by pair with its interval."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from scipy import stats

from specgram_lab import models
from specgram_lab.builders import options
from specgram_lab.handover import PARENT
from specgram_lab.spec import Cell


class Worker:
    """One engine in a process of its own; a context manager that ends it."""

    def __init__(self, cell: Cell, patches: dict[str, dict[str, Any]] | None = None) -> None:
        models.ensure_all(cell.target.model, cell.drafter.model)
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "cell.json"
        path.write_text(json.dumps(cell.model_dump(mode="json")), encoding="utf-8")
        environment = os.environ | options.environment(cell, "cpu", Path(self.folder.name))
        if patches is not None:
            environment[options.PATCHES] = ",".join(patches)
            environment[options.OPTIONS] = json.dumps(patches)
        environment = {key: value for key, value in environment.items() if value != ""} | {PARENT: str(os.getpid())}
        self.log = (Path(self.folder.name) / "log").open("w")
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(path)]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = Path(self.log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"the engine ended: {' '.join(tail)}")
        return dict(json.loads(line))

    def run(self, *, record: bool = False, profile: bool = False, cprofile: bool = False) -> dict[str, Any]:
        """One pass over the workload."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"record": record, "profile": profile, "cprofile": cprofile}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()
        self.folder.cleanup()


def ratio(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Median of the pairs' ratios first / second, and a 95 % bootstrap interval of it over the pairs."""
    ratios = np.asarray(first) / np.asarray(second)
    rng = np.random.default_rng(7)
    medians = np.median(rng.choice(ratios, size=(4000, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return {"ratio": float(np.median(ratios)), "low": float(low), "high": float(high), "pairs": len(ratios)}


def speed(one: dict[str, Any], clock: str = "cpu_seconds") -> float:
    """Tokens a second."""
    return float(one["tokens"]) / float(one[clock])


def against(first: Worker, second: Worker, pairs: int) -> dict[str, Any]:
    """Speed of ``first`` over ``second``, pass by pass, which of the two begins changing every time."""
    first.run(), second.run()
    a, b = [], []
    for number in range(pairs):
        for worker, seen in ((first, a), (second, b))[:: 1 if number % 2 else -1]:
            seen.append(worker.run())
    result: dict[str, Any] = ratio([speed(x) for x in a], [speed(x) for x in b])
    result["clock"] = ratio([speed(x, "seconds") for x in a], [speed(x, "seconds") for x in b])
    result |= {"tokens_per_s": speed(a[-1]), "same_texts": len({x["texts"] for x in a + b}) == 1}
    result |= {name: [a[-1][name], b[-1][name]] for name in ("steps", "scheduled", "accepted")}
    return result


def step_ratio(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Sum over steps of the median over passes, ``first`` over ``second`` (passes x steps), and a 95 % interval.

    The interval is a bootstrap over the passes, drawn in pairs.
    """
    rng = np.random.default_rng(7)
    drawn = [rng.integers(len(first), size=len(first)) for _ in range(1000)]
    ratios = [float(np.median(first[d], axis=0).sum() / np.median(second[d], axis=0).sum()) for d in drawn]
    whole = float(np.median(first, axis=0).sum() / np.median(second, axis=0).sum())
    return {"ratio": whole, "low": float(np.quantile(ratios, 0.025)), "high": float(np.quantile(ratios, 0.975))}


def pooled(ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean of the ratios of several cases, and Student's 95 % interval of it over the cases."""
    logs = np.log(np.asarray(ratios))
    mean, error = logs.mean(), logs.std(ddof=1) / np.sqrt(len(logs))
    low, high = stats.t.interval(0.95, len(logs) - 1, mean, error)
    return {"ratio": float(np.exp(mean)), "low": float(np.exp(low)), "high": float(np.exp(high)), "cases": len(logs)}
