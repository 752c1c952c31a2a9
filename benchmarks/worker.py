"""An engine that runs one workload again and again on demand: ``python benchmarks/worker.py CELL.json``.

Reads one JSON line per pass (``{"record": bool, "profile": bool}``), answers with one: seconds of the clock and of the
processor, engine steps and the processor's seconds of each, output tokens, scheduled and accepted drafts, the texts'
hash, and, if asked, the seconds spent in each part of a step.
"""

from __future__ import annotations

import cProfile
import gc
import hashlib
import json
import os
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specgram_lab.cell import die_with_parent
from specgram_lab.spec import Cell, parse_cell


def parts(llm: Any) -> dict[str, list[tuple[Any, str]]]:
    """Where the time of a step is measured; what lies inside another part is taken off that one."""
    core = llm.llm_engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    manager = core.structured_output_manager
    from specgram_lab.samplers.hooks import RECORDER

    found = {
        "grammar": [(manager, "grammar_bitmask"), (manager, "validate_tokens"), (manager, "accept_tokens")],
        "scheduler": [(scheduler, "schedule"), (scheduler, "update_from_output")],
        "model": [(runner, "execute_model")],
        "sampling": [(runner, "sample_tokens")],
        "recorder": [(RECORDER, name) for name in ("proposed", "executed", "judged", "finished")],
    }
    if hasattr(runner, "speculator"):
        found["drafter"] = [(runner.speculator, "propose")] if runner.speculator is not None else []
    elif hasattr(runner, "drafter"):
        found["drafter"] = [(runner, "propose_draft_token_ids")]
    return found


@contextmanager
def timed(places: dict[str, list[tuple[Any, str]]], spent: Counter[str]) -> Iterator[None]:
    """Wrap the functions on their objects; nested parts count for the innermost."""
    stack: list[float] = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **options: Any) -> Any:
            stack.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                whole = time.perf_counter() - begin
                spent[name] += whole - stack.pop()
                if stack:
                    stack[-1] += whole

        return measured

    for name, owners in places.items():
        for owner, attribute in owners:
            setattr(owner, attribute, wrap(name, getattr(owner, attribute)))
    try:
        yield
    finally:
        for owners in places.values():
            for owner, attribute in owners:
                delattr(owner, attribute)


def one_pass(cell: Cell, llm: Any, profile: bool) -> dict[str, Any]:
    """Run the workload once."""
    from specgram_lab.builders.session import Session

    session = Session(cell, llm, progress=Path(os.devnull))
    steps: list[float] = []
    engine = llm.llm_engine
    original = engine.step

    def step() -> Any:
        before = time.process_time()
        result = original()
        if result:  # not one of those that wait for a grammar to be compiled
            steps.append(time.process_time() - before)
        return result

    engine.step = step
    spent: Counter[str] = Counter()
    llm.reset_prefix_cache()
    begin = time.process_time()
    with timed(parts(llm) if profile else {}, spent):
        session.run()
    cpu_seconds = time.process_time() - begin
    del engine.step
    texts = "\0".join(s.output.outputs[0].text for s in session.requests)
    reported = [m.to_dict() for s in session.requests if (m := s.output.outputs[0].spec_decode_metrics) is not None]
    return {
        "seconds": session.seconds,
        "cpu_seconds": cpu_seconds,
        "steps": len(steps),
        "step_cpu_seconds": steps,
        "tokens": session.output_tokens,
        "scheduled": sum(m["num_draft_tokens"] for m in reported),
        "accepted": sum(m["num_accepted_draft_tokens"] for m in reported),
        "texts": hashlib.sha256(texts.encode()).hexdigest()[:12],
        "parts": dict(spent),
    }


def recorder_share(cell: Cell, llm: Any) -> float:
    """Share of a pass in the recorder's own code by cProfile, which makes small functions look dearer."""
    profiler = cProfile.Profile()
    profiler.enable()
    one_pass(cell, llm, profile=False)
    profiler.disable()
    found = pstats.Stats(profiler)
    own = 0.0
    for (file, _, _), (_, _, spent, _, callers) in found.stats.items():  # type: ignore[attr-defined]
        if "specgram_lab/samplers" in file:
            own += spent
        else:  # what the recorder calls of C code, such as a tensor's tolist
            own += sum(call[2] for (caller, _, _), call in callers.items() if file == "~" and "lab/samplers" in caller)
    return own / found.total_tt  # type: ignore[attr-defined]


def main() -> None:
    """Build the engine, say so, and serve passes until the input ends."""
    die_with_parent()
    from specgram_lab import patches
    from specgram_lab.builders import local
    from specgram_lab.samplers.hooks import RECORDER

    cell = parse_cell(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints where it likes
    with local.quick_start():
        llm = local.build(cell)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("record") and "recorder" not in patches.active():
            patches.activate(["recorder"], {"recorder": {"runner": cell.engine.runner}})
        elif not asked.get("record") and "recorder" in patches.active():
            patches.deactivate("recorder")
        RECORDER.clear()
        gc.collect()  # what switching a patch left behind is not part of a pass
        if asked.get("cprofile"):
            print(json.dumps({"recorder_share": recorder_share(cell, llm)}), file=answers, flush=True)
            continue
        print(json.dumps(one_pass(cell, llm, bool(asked.get("profile")))), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
