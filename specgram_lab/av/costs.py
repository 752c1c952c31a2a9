"""Cost curves: what a step costs, as data with a source. Adaptive verification picks its budget by them.

A curve has the time of the target's forward pass over the number of tokens in it, and that of the drafter over the
number of requests. Named curves are YAML files in ``data/costs``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specgram_lab.paths import DATA

Floats = npt.NDArray[np.float64]


class CostError(ValueError):
    """A cost curve that is not there or makes no sense, said in one sentence."""


class Point(BaseModel):
    """``ms`` milliseconds for ``size`` tokens or requests, with the interval of the measurement where it has one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: Annotated[int, Field(ge=0)]
    ms: Annotated[float, Field(ge=0)]
    low: float | None = None
    high: float | None = None


class CostCurve(BaseModel):
    """What a step costs.

    ``verify``: the target's forward pass by tokens in it; ``draft``: the drafter by requests. ``graph_limit`` is the
    largest captured size of an engine with full CUDA graphs: up to it a step is padded to the next measured size, and
    its cost is a step function. With 0 nothing pads, and the cost between two measured sizes lies on a line. Beyond
    the last size the last slope goes on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: str
    machine: str
    model: str
    note: str = ""
    graph_limit: Annotated[int, Field(ge=0)] = 0
    verify: Annotated[tuple[Point, ...], Field(min_length=2)]
    draft: Annotated[tuple[Point, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _sizes_ascend(self) -> Self:
        for kind in ("verify", "draft"):
            sizes = [point.size for point in getattr(self, kind)]
            if sizes != sorted(set(sizes)):
                raise CostError(f"the sizes of {kind} in cost curve {self.name} do not ascend: {sizes}")
        return self

    def points(self, kind: str) -> list[tuple[int, float]]:
        """(size, ms) as vLLM's `build_cost_tables_from_curves` takes them; without padding, one for every size."""
        sizes, times = np.array([(p.size, p.ms) for p in getattr(self, kind)]).T
        if self.graph_limit == 0:
            every = np.arange(int(sizes[0]), int(sizes[-1]) + 1)
            sizes, times = every, np.interp(every, sizes, np.maximum.accumulate(times))
        return [(int(size), float(ms)) for size, ms in zip(sizes, times, strict=True)]

    def tables(self, max_requests: int, max_tokens: int) -> tuple[Floats, Floats]:
        """Milliseconds of a draft step for 0 to ``max_requests``, of a verification for 0 to ``max_tokens`` tokens.

        The arithmetic is that of vLLM's `build_cost_tables_from_curves` (adaptive_verification.py, 0.28 to 0.33).
        """
        draft = self._table("draft", max_requests)
        return np.maximum(draft, 0.0), np.maximum(self._table("verify", max_tokens), 1e-6)

    def _table(self, kind: str, limit: int) -> Floats:
        sizes, times = np.array(self.points(kind), dtype=np.float64).T
        times = np.maximum.accumulate(times)
        values = np.arange(limit + 1)
        result: Floats = times[np.minimum(np.searchsorted(sizes, values, side="left"), len(sizes) - 1)]
        if self.graph_limit:
            smooth, above = values > self.graph_limit, sizes > self.graph_limit
            if smooth.any() and above.any():
                result[smooth] = np.interp(values[smooth], sizes[above], times[above])
        if len(sizes) > 1:
            after = values > sizes[-1]
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            result[after] = times[-1] + slope * (values[after] - sizes[-1])
        return result


def linear(base: float, slope: float) -> CostCurve:
    """A made-up curve: verifying n tokens costs ``base + slope * n``, drafting costs nothing."""
    return CostCurve(
        name=f"linear({base:g}, {slope:g})",
        source="made up",
        machine="none",
        model="none",
        verify=(Point(size=0, ms=base), Point(size=1, ms=base + slope)),
        draft=(Point(size=0, ms=0.0), Point(size=1, ms=0.0)),
    )


def names() -> list[str]:
    """Names of all curves in ``data/costs``."""
    return sorted(path.stem for path in (DATA / "costs").glob("*.yaml"))


def load(name: str) -> CostCurve:
    """A curve by name, or from the path of a YAML file.

    Raises:
        CostError: naming the curves that there are, or what is wrong with this one.
    """
    path = Path(name) if name.endswith(".yaml") else DATA / "costs" / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        raise CostError(f"no cost curve {name!r}; there are {', '.join(names()) or 'none'}") from None
    except yaml.YAMLError as error:
        raise CostError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise CostError(f"{path}: a cost curve is a mapping, got {type(content).__name__}")
    try:
        return CostCurve.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"]) or "curve"
        raise CostError(f"{path}: {where}: {fault['msg'].removeprefix('Value error, ')}") from None


def dump(curve: CostCurve) -> str:
    """YAML of a curve; `load` gives the same one back."""
    return yaml.safe_dump(curve.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)
