"""Acceptance lines of the log, four generations of them: units made equal, cumulative and interval told apart.

V0 (up to 0.9) prints ``Speculative metrics``, cumulative since the engine's start, with a rate that also credits
tokens behind the first miss. V1 prints ``SpecDecoding metrics`` for each interval: first with a rate and two
counts, then with a length and rates per position, then with throughputs and the rate at the end.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from specgram_lab.semantics import SemanticsError, check_positions

_SHAPES = {
    "Draft acceptance rate": re.compile(r"(nan|\d{1,12}(?:\.\d{1,12})?)(%?)"),
    "Avg Draft acceptance rate": re.compile(r"(nan|\d{1,12}(?:\.\d{1,12})?)(%?)"),
    "Mean acceptance length": re.compile(r"(nan|\d{1,12}(?:\.\d{1,12})?)"),
    "Accepted": re.compile(r"(\d{1,15}) tokens"),
    "Drafted": re.compile(r"(\d{1,15}) tokens"),
    "Per-position acceptance rate": re.compile(r"(\d\.\d{1,6}(?:, \d\.\d{1,6}){0,255})"),
    "System efficiency": re.compile(r"(nan|\d{1,12}(?:\.\d{1,12})?)"),
    "Number of accepted tokens": re.compile(r"(\d{1,15})"),
    "Number of draft tokens": re.compile(r"(\d{1,15})"),
    "Number of emitted tokens": re.compile(r"(\d{1,15})"),
}
"""What a line may say of itself, by its words, and the shape of the value behind the colon."""
_HALF = {"rate": 0.0005001, "length": 0.005001, "position": 0.0005001}
"""Half of the last printed digit: 0.1 %, 0.01 tokens, 0.001."""


class SpecLine(NamedTuple):
    """One acceptance line. Rates are fractions; what the line does not print, or prints as nan, is None.

    ``definition`` is ``v0`` (cumulative, and tokens behind the first miss count as accepted) or ``v1`` (an interval).
    """

    definition: Literal["v0", "v1"]
    accepted: int
    drafted: int
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    per_position: tuple[float, ...] = ()
    emitted: int | None = None
    system_efficiency: float | None = None

    def fault(self) -> str | None:
        """Why the line's own numbers do not fit each other, or None; a cut or overwritten line shows itself here."""
        if self.accepted > self.drafted:
            return f"log reader: accepted {self.accepted} is more than drafted {self.drafted}"
        if self.definition == "v0":
            return None
        if (self.acceptance_rate is None) != (self.drafted == 0):
            return f"log reader: a line with {self.drafted} drafted tokens has the rate {self.acceptance_rate}"
        if (
            self.acceptance_rate is not None
            and abs(self.acceptance_rate - self.accepted / self.drafted) > _HALF["rate"]
        ):
            return f"log reader: rate {self.acceptance_rate:.3f} is not {self.accepted} / {self.drafted}"
        if self.mean_acceptance_length is not None and self.per_position:
            tolerance = _HALF["length"] + len(self.per_position) * _HALF["position"]
            try:
                check_positions(
                    self.mean_acceptance_length, self.per_position, source="log reader", tolerance=tolerance
                )
            except SemanticsError as error:
                return str(error)
        return None


def parse_spec_line(message: str) -> SpecLine | None:
    """The numbers of an acceptance line's message; None if it is none or one of its counts is missing."""
    old = message.startswith("Speculative metrics: ")
    if not old and not message.startswith("SpecDecoding metrics: "):
        return None
    found = _values(message)
    accepted = _count(found.get("Number of accepted tokens" if old else "Accepted"))
    drafted = _count(found.get("Number of draft tokens" if old else "Drafted"))
    if accepted is None or drafted is None:
        return None
    rate = found.get("Avg Draft acceptance rate") or found.get("Draft acceptance rate")
    fraction = _real(rate)
    if fraction is not None and rate is not None and rate.group(2):
        fraction /= 100
    positions = found.get("Per-position acceptance rate")
    return SpecLine(
        definition="v0" if old else "v1",
        accepted=accepted,
        drafted=drafted,
        acceptance_rate=fraction,
        mean_acceptance_length=_real(found.get("Mean acceptance length")),
        per_position=tuple(map(float, positions.group(1).split(", "))) if positions else (),
        emitted=_count(found.get("Number of emitted tokens")) if old else None,
        system_efficiency=_real(found.get("System efficiency")) if old else None,
    )


def _values(message: str) -> dict[str, re.Match[str]]:
    """What the line says under each of its words; the first time counts, and a value of another shape does not."""
    _, *pieces = message.rstrip(". \r\n\t").split(": ")
    found: dict[str, re.Match[str]] = {}
    name = ""
    for piece in pieces[:-1]:  # "value, next name" each, but for the first, which is a name alone
        value, _, following = piece.rpartition(", ")
        _keep(found, name, value)
        name = following
    if pieces:
        _keep(found, name, pieces[-1])
    return found


def _keep(found: dict[str, re.Match[str]], name: str, value: str) -> None:
    if name in _SHAPES and (match := _SHAPES[name].fullmatch(value)):
        found.setdefault(name, match)


@dataclass
class Acceptance:
    """The acceptance lines of a log, summed as their definition asks: V1 intervals are added, of V0 the last counts.

    ``damaged`` holds the first lines whose numbers do not fit each other; they are in no sum.
    """

    intervals: int = 0
    accepted: int = 0
    drafted: int = 0
    last_v0: dict[str, SpecLine] = field(default_factory=dict)
    ended_v0: list[SpecLine] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    damaged_lines: int = 0

    def add(self, line: SpecLine, process: str) -> None:
        """Take one line of ``process`` in; a V0 count that went down is a new engine."""
        fault = line.fault()
        if fault is not None:
            self.damaged_lines += 1
            if len(self.damaged) < 5:
                self.damaged.append(fault)
        elif line.definition == "v1":
            self.intervals += 1
            self.accepted += line.accepted
            self.drafted += line.drafted
        else:
            before = self.last_v0.get(process)
            if before is not None and line.drafted < before.drafted and len(self.ended_v0) < 1000:
                self.ended_v0.append(before)
            self.last_v0[process] = line

    def to_dict(self) -> dict[str, Any] | None:
        """Plain data, one entry a definition; None without an acceptance line."""
        entries: dict[str, Any] = {}
        if self.intervals:
            entries["v1"] = {
                "lines": self.intervals, "accepted": self.accepted, "drafted": self.drafted,
                "acceptance_rate": _ratio(self.accepted, self.drafted),
            }  # fmt: skip
        last = [*self.ended_v0, *self.last_v0.values()]
        if last:
            accepted, drafted = sum(line.accepted for line in last), sum(line.drafted for line in last)
            entries["v0"] = {
                "engines": len(last), "accepted": accepted, "drafted": drafted, "emitted": _sum_emitted(last),
                "acceptance_rate": _ratio(accepted, drafted),
            }  # fmt: skip
        return entries or None


def _sum_emitted(lines: list[SpecLine]) -> int | None:
    known = [line.emitted for line in lines if line.emitted is not None]
    return sum(known) if len(known) == len(lines) else None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _count(found: re.Match[str] | None) -> int | None:
    return int(found.group(1)) if found else None


def _real(found: re.Match[str] | None) -> float | None:
    value = float(found.group(1)) if found else math.nan
    return None if math.isnan(value) else value
