"""What a sweep is: axes, fixed values, exclusions, repeats and limits, as YAML or as an object in Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, JsonValue, ValidationError, model_validator

from specgram_lab.spec import Cell, Limits, Model, SpecError, explain, parse_cell, read_yaml

SHORT = {
    "k": "drafter.k",
    "runner": "engine.runner",
    "scheduling": "engine.scheduling",
    "budget": "engine.budget",
    "build": "engine.build",
}
"""Axes that may go by the word that the lab uses for them; every other one is a path in a cell."""
FILES = ("prompts", "scenario")
"""Keys of a workload that may name a file beside the sweep's own."""
NAMES = ("name", "method", "kind", "policy", "scenario", "prompts", "model")
"""Keys whose value names a mapping in tables, the first that it has."""


class Resources(Model):
    """What one engine asks for: how many run at once on this machine, or where Ray puts them.

    The memory is what an engine with the small target needs at its start, KV cache included; a larger one wants more.
    """

    cpus: Annotated[int, Field(ge=1)] = 2
    gpus: Annotated[int, Field(ge=0)] = 0
    memory_mib: Annotated[int, Field(ge=256)] = 4096


class Sweep(Model):
    """A grid of cells. `parse` and `load` make one and say in one sentence what is wrong with it.

    ``axes`` maps a path in a cell (``drafter``, ``engine.scheduling``) or a word of `SHORT` to its values, a list or a
    mapping from a label to a value. ``fixed`` holds what all cells share. ``exclude``: a combination is left out where
    all entries of one mapping (path to a value, or to a list of them) hold. ``repeats`` run every combination with the
    workload's seed, the next one, and so on. ``alternating`` makes each repeat a pass with engines of its own, every
    second one in reverse order, so that a drift of the machine meets all cells alike.
    """

    name: str = "sweep"
    axes: dict[str, dict[str, JsonValue]]
    fixed: dict[str, JsonValue] = Field(default_factory=dict)
    exclude: tuple[dict[str, JsonValue], ...] = ()
    repeats: Annotated[int, Field(ge=1)] = 1
    alternating: bool = False
    limits: Limits = Limits()
    resources: Resources = Resources()

    @model_validator(mode="before")
    @classmethod
    def _labelled(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("axes"), dict):
            return {**value, "axes": {str(name): _labels(str(name), v) for name, v in value["axes"].items()}}
        return value

    def combinations(self) -> list[tuple[dict[str, str], Cell]]:
        """Every combination that is not excluded, as its labels by axis and its cell, once each.

        The axis ``k`` leaves a cell without a drafter as it is: its k is 0.

        Raises:
            SpecError: a combination that no cell can be, with its labels.
        """
        names = sorted(self.axes, key=lambda name: path_of(name).count("."))  # a part before what lies inside it
        found: dict[str, tuple[dict[str, str], Cell]] = {}
        for chosen in product(*(self.axes[name].items() for name in names)):
            where = {name: label for name, (label, _) in zip(names, chosen, strict=True)}
            content: dict[str, Any] = json.loads(json.dumps(self.fixed))
            for name, (_, value) in zip(names, chosen, strict=True):
                path = path_of(name)
                if path == "drafter.k" and content.get("drafter", {}).get("method", "none") == "none":
                    where[name] = "0"
                else:
                    _put(content, path.split("."), value)
            try:
                cell = parse_cell(content | {"limits": self.limits.model_dump()})
            except SpecError as error:
                raise SpecError(f"{_shown(where)}: {error}") from None
            if not any(_matches(cell, rule) for rule in self.exclude):
                found.setdefault(cell.cell_id, ({name: where[name] for name in self.axes}, cell))
        return list(found.values())


def path_of(axis: str) -> str:
    """The path in a cell that an axis sets."""
    return SHORT.get(axis, axis)


def value_at(cell: Cell, path: str) -> Any:
    """What stands at a path (or word of `SHORT`) of ``cell``.

    Raises:
        SpecError: there is no such path.
    """
    value: Any = cell
    for part in path_of(path).split("."):
        if not (isinstance(value, Model) and part in type(value).model_fields):
            raise SpecError(f"{path} is no path in a cell")
        value = getattr(value, part)
    return value.model_dump(mode="json") if isinstance(value, Model) else value


def parse(content: Any, base: Path | None = None) -> Sweep:
    """A `Sweep` from plain data; files that it names lie relative to ``base``.

    Raises:
        SpecError: one sentence on what is wrong.
    """
    if not isinstance(content, dict):
        raise SpecError(f"a sweep is a mapping, got {type(content).__name__}")
    try:
        sweep = Sweep.model_validate(_anchored(content, base or Path()))
    except ValidationError as error:
        raise SpecError(explain(error)) from None
    if not sweep.axes or not all(sweep.axes.values()):
        raise SpecError("a sweep needs at least one axis, and each axis at least one value")
    return sweep


def load(path: Path) -> Sweep:
    """A `Sweep` from a YAML file; raises `SpecError` with the file's name in front."""
    content = read_yaml(path)
    try:
        return parse(content, path.absolute().parent)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def dump(sweep: Sweep) -> str:
    """``sweep`` as YAML, which `load` reads back; what is as it is by itself is left out."""
    return yaml.safe_dump(sweep.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)


def _labels(axis: str, values: Any) -> dict[str, Any]:
    """The values of an axis by label: those given, or a name in each, or what tells it from the others."""
    if isinstance(values, Mapping):
        return {str(label): value for label, value in values.items()}
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise SpecError(f"axis {axis} holds a list or a mapping of values, got {values!r}")
    named = [_name(value) for value in values]
    full = [_name(value, whole=True) for value in values]
    labels = [long if named.count(short) > 1 else short for short, long in zip(named, full, strict=True)]
    for label in labels:
        if labels.count(label) > 1:
            raise SpecError(f"axis {axis} has the value {label} twice")
    return dict(zip(labels, values, strict=True))


def _name(value: Any, *, whole: bool = False) -> str:
    if not isinstance(value, Mapping):
        return value if isinstance(value, str) else json.dumps(value)
    key = next((key for key in NAMES if key in value), None)
    if key is None:
        return json.dumps(value, sort_keys=True)
    rest = {name: item for name, item in value.items() if name != key} if whole else {}
    return " ".join([str(value[key]), *(f"{name}={_name(item)}" for name, item in rest.items())])


def _put(content: dict[str, Any], path: list[str], value: Any) -> None:
    """Set ``value`` at ``path``; a mapping is laid over what is there."""
    for part in path[:-1]:
        content = content.setdefault(part, {})
    there = content.get(path[-1])
    content[path[-1]] = {**there, **value} if isinstance(there, dict) and isinstance(value, dict) else value


def _matches(cell: Cell, rule: Mapping[str, JsonValue]) -> bool:
    for path, wanted in rule.items():
        found = value_at(cell, path)
        if not any(_equal(found, one) for one in (wanted if isinstance(wanted, list) else [wanted])):
            return False
    return bool(rule)


def _equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(key in found and _equal(found[key], v) for key, v in wanted.items())
    return bool(found == wanted)


def _shown(where: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {label}" for name, label in where.items())


def _anchored(content: dict[str, Any], base: Path) -> dict[str, Any]:
    """The same with every file that lies relative to ``base`` by its full path."""

    def anchor(item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [anchor(one) for one in item]
        if not isinstance(item, dict):
            return item
        item = {key: anchor(value) for key, value in item.items()}
        for key in ("file", *FILES):
            if isinstance(item.get(key), str) and (base / item[key]).is_file():
                item[key] = str((base / item[key]).resolve())
        return item

    axes = content.get("axes")
    if isinstance(axes, dict):
        paths = {f"workload.{key}" for key in FILES} | {"grammar.file"}
        given = {name: anchor(values) for name, values in axes.items()}
        for name in paths & set(given):
            values = given[name]
            named = values if isinstance(values, dict) else dict(enumerate(values))
            found = {label: anchor({FILES[0]: value})[FILES[0]] for label, value in named.items()}
            given[name] = found if isinstance(values, dict) else list(found.values())
        content = {**content, "axes": given}
    return {**content, "fixed": anchor(content.get("fixed", {}))}
