"""Run a notebook with parameters through papermill, and believe nothing that papermill says of its success.

papermill marks every cell completed when a kernel dies, only logs a parameter that the notebook does not know, and
turns what it cannot translate into text. So parameters are checked first, and a notebook has succeeded when its last
cell has written `MARK` with the parameters it saw (`close`), and these are the ones that were given.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from specgram_lab.handover import write_json
from specgram_lab.spec import SpecError

MARK = "notebook.json"
CONNECTION = ".kernel-{}.json"
"""Where and with which key to reach the kernel of a process while it runs; in the notebook's folder, where the next
run finds what one that was killed left."""
LONG, KEPT = 100_000, 4000
"""An output of more characters than the first is cut in an executed copy, which keeps so many of each end."""
Outcome = Literal["ok", "failed", "kernel_died", "no_data"]


@dataclass(frozen=True)
class Executed:
    """What became of a notebook. ``reason`` is one sentence for every outcome but ok."""

    outcome: Outcome
    reason: str
    notebook: Path
    parameters: dict[str, Any]
    seconds: float


def defaults(path: Path) -> dict[str, Any]:
    """The literal values in the notebook's cell tagged ``parameters``.

    Raises:
        SpecError: there is no such cell, or more than one, or it holds something else than literals.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    tagged = [c for c in content["cells"] if "parameters" in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise SpecError(f"{path} has {len(tagged)} cells tagged parameters, one is wanted")
    values = {}
    for statement in ast.parse("".join(tagged[0]["source"])).body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            raise SpecError(f"{path}: line {statement.lineno} of the parameters cell is no plain assignment")
        target = statement.targets[0]
        try:
            assert isinstance(target, ast.Name)
            values[target.id] = ast.literal_eval(statement.value)
        except (AssertionError, ValueError):
            raise SpecError(f"{path}: line {statement.lineno} of the parameters cell holds no literal") from None
    return values


def plain(name: str, value: Any) -> Any:
    """``value``, if papermill hands it over unchanged: texts, numbers, None, and lists and mappings of them.

    Raises:
        SpecError: naming the parameter and the type that would change on the way.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise SpecError(f"parameter {name} is {value}, which JSON cannot hold")
        return value
    if type(value) is list:
        return [plain(name, item) for item in value]
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise SpecError(f"parameter {name} has the key {key!r}, keys are texts")
        return {key: plain(name, item) for key, item in value.items()}
    raise SpecError(f"parameter {name} is a {type(value).__name__}; give texts, numbers, lists or mappings")


def checked(path: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, if the notebook has them all and each goes over unchanged.

    Raises:
        SpecError: naming the one that it has not, or that would change.
    """
    known = defaults(path)
    given = {name: plain(name, value) for name, value in parameters.items()}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise SpecError(f"{path.name} has no parameter {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
    return given


def _end_kernel(connection: Path) -> None:
    """End the kernel if it still is there, as after an interruption while it started; remove what kernels wrote."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if str(connection) in child.cmdline():
                child.kill()
                child.wait(5)
    for path in connection.parent.glob(CONNECTION.format("*")):
        path.unlink(missing_ok=True)


def unformatted(path: Path) -> str:
    """A path as papermill takes it unchanged: it fills in what stands in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def execute(path: Path, out: Path, parameters: Mapping[str, Any] | None = None) -> Executed:
    """Run the notebook; the executed copy, and what its code prints, go to ``out``, which it gets as ``out`` too.

    Raises:
        SpecError: a parameter that the notebook does not have, or that would change on the way.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    given = checked(path, parameters or {})
    out.mkdir(parents=True, exist_ok=True)
    if "out" in defaults(path):  # as the notebook sees it, so that the executed copy names no folder of this machine
        given.setdefault("out", os.path.relpath(out, path.parent))
    (out / MARK).unlink(missing_ok=True)
    connection = out.absolute() / CONNECTION.format(os.getpid())
    copy = out / path.name
    begin = time.monotonic()
    outcome: Outcome = "ok"
    reason = ""
    try:
        with (out / f"{path.stem}.log").open("w", encoding="utf-8") as log:
            papermill.execute_notebook(
                unformatted(path), unformatted(copy), parameters=given, kernel_name="python3",
                language="python", cwd=str(path.parent),
                progress_bar=False, stdout_file=log, stderr_file=log, log_output=False,
                config=Config({"KernelManager": {"connection_file": str(connection)}}),
            )  # fmt: skip
    except DeadKernelError:
        outcome, reason = "kernel_died", "the kernel ended in the middle of the notebook"
    except PapermillExecutionError as error:
        outcome, reason = "failed", f"cell {error.exec_count}: {error.ename}: {' '.join(str(error.evalue).split())}"
    except Exception as error:  # noqa: BLE001  a time-out of papermill, a kernel that does not start
        outcome, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        _end_kernel(connection)
    seconds = time.monotonic() - begin
    if copy.is_file():
        shorten(copy, f"{path.stem}.log")
    seen = json.loads((out / MARK).read_text(encoding="utf-8"))["parameters"] if (out / MARK).is_file() else None
    if outcome == "ok":
        if seen is None:
            outcome, reason = (
                "no_data",
                "the notebook ended without writing its mark: its last cell must call lab.close",
            )
        else:
            wrong = [name for name, value in given.items() if seen.get(name) != value]
            if wrong:
                name = wrong[0]
                outcome, reason = "failed", f"parameter {name} was {given[name]!r}, the notebook saw {seen.get(name)!r}"
    return Executed(outcome, reason, copy, seen or {}, seconds)


def shorten(copy: Path, log: str) -> None:
    """Cut the middle out of long texts among the outputs of an executed copy; what was printed stands in ``log``."""
    content = json.loads(copy.read_text(encoding="utf-8"))
    for output in (output for cell in content["cells"] for output in cell.get("outputs", ())):
        for holder, key in ((output, "text"), (output.get("data", {}), "text/plain")):
            text = holder.get(key)
            text = "".join(text) if isinstance(text, list) else text
            if text and len(text) > LONG:
                left_out = f"\n[{len(text) - 2 * KEPT} characters left out here; what was printed is in {log}]\n"
                holder[key] = f"{text[:KEPT]}{left_out}{text[-KEPT:]}"
    part = copy.with_name(f".{copy.name}.tmp")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(copy)


def close(folder: str | Path, parameters: Mapping[str, Any], *, rows: int) -> None:
    """For the last cell of a notebook: say that it is through, with the parameters it saw and its rows of results.

    Raises:
        SpecError: there are no rows; a notebook that ran and measured nothing has not succeeded.
    """
    if rows < 1:
        raise SpecError("the notebook came to its end without one row of results")
    write_json(Path(folder) / MARK, {"parameters": dict(parameters), "rows": rows})
