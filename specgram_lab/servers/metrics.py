"""A server's speculative counters out of an exposition: per engine, between two moments, and never out of gauges.

What an exposition does not have is None or absent, not zero. vLLM V1 has per-step counters; V0 had gauges, which are
kept as they are; other servers' gauges likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from specgram_lab.semantics import SemanticsError, check_positions
from specgram_lab.servers.exposition import Exposition, Sample

COUNTERS: Final[Mapping[str, tuple[str, ...]]] = {
    "drafts": ("spec_decode_num_drafts",),
    "draft_tokens": ("spec_decode_num_draft_tokens",),
    "accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "verified_tokens": ("spec_decode_num_verified_tokens", "spec_decode_num_verified_draft_tokens"),
    "emitted_tokens": ("spec_decode_num_emitted_tokens",),
    "generation_tokens": ("generation_tokens",),
}
"""Counter here, and vLLM's names for it without ``vllm:`` and ``_total``. Emitted tokens are V0's; verified is
proposed (vllm#58340, vllm#64156) and in no release up to 0.33."""
PER_POSITION: Final = "spec_decode_num_accepted_tokens_per_pos"
ALIASES: Final[Mapping[str, str]] = {"vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc"}
"""Gauges that were renamed, old name first."""
V0_GAUGES: Final = ("vllm:spec_decode_draft_acceptance_rate", "vllm:spec_decode_efficiency")
PROMQL: Final[Mapping[str, str]] = {
    "acceptance_rate": "sum(rate(vllm:spec_decode_num_accepted_tokens_total[5m]))"
    " / sum(rate(vllm:spec_decode_num_draft_tokens_total[5m]))",
    "mean_acceptance_length": "1 + sum(rate(vllm:spec_decode_num_accepted_tokens_total[5m]))"
    " / sum(rate(vllm:spec_decode_num_drafts_total[5m]))",
}
_SOURCE: Final = "metrics reader"


@dataclass(frozen=True)
class SpecCounters:
    """Counters of one engine, or of several summed. None where the server has none; ``per_position`` from position 0.

    ``created`` is when the counters began (Unix seconds), where the server says so.
    """

    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    verified_tokens: int | None = None
    emitted_tokens: int | None = None
    generation_tokens: int | None = None
    per_position: tuple[int, ...] = ()
    created: float | None = None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts, in tokens a spec step; None without a draft."""
        if self.accepted_tokens is None or not self.drafts:
            return None
        return 1 + self.accepted_tokens / self.drafts

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted, a fraction; None without a drafted token."""
        if self.accepted_tokens is None or not self.draft_tokens:
            return None
        return self.accepted_tokens / self.draft_tokens

    @property
    def per_position_rates(self) -> tuple[float, ...]:
        """Accepted at each position / drafts; empty without a draft."""
        return tuple(count / self.drafts for count in self.per_position) if self.drafts else ()

    def check(self) -> None:
        """Check the identity length = 1 + sum of the per-position rates.

        Raises:
            SemanticsError: it is broken; the message names this reader, since a vector that was overwritten instead
                of added shows itself here.
        """
        if self.mean_acceptance_length is not None and self.per_position:
            check_positions(self.mean_acceptance_length, self.per_position_rates, source=_SOURCE)


@dataclass(frozen=True)
class Engines:
    """The counters of every engine by its labels, and what is to be said about them."""

    engines: Mapping[tuple[tuple[str, str], ...], SpecCounters] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> SpecCounters | None:
        """All engines together; None without one. A counter that one of them lacks is None."""
        return add_up(list(self.engines.values())) if self.engines else None


def engines(exposition: Exposition) -> Engines:
    """Every engine's counters in ``exposition``; a gauge is no counter whatever its name."""
    read: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    notes: list[str] = []
    for counter, names in COUNTERS.items():
        for sample in _counter_samples(exposition, names, notes):
            read.setdefault(_engine(sample), {})[counter] = int(sample.value)
    for sample in _counter_samples(exposition, (PER_POSITION,), notes):
        position = sample.labels.get("position", "")
        if not (position.isascii() and position.isdecimal() and int(position) < 4096):
            notes.append(f"{sample.name} has the position {position!a}, a whole number from 0 is wanted")
            continue
        read.setdefault(_engine(sample), {}).setdefault("positions", {})[int(position)] = int(sample.value)
    for name in COUNTERS["drafts"]:
        for sample in _named(exposition, f"{name}_created"):
            if _engine(sample) in read:
                read[_engine(sample)]["created"] = sample.value
    found = {key: _counters(dict(values), notes) for key, values in read.items()}
    spec = {key: item for key, item in found.items() if item.drafts is not None or item.accepted_tokens is not None}
    return Engines(spec or found, tuple(dict.fromkeys(notes)))


def difference(before: Engines, after: Engines) -> Engines:
    """What was counted between two expositions of one server, per engine.

    A counter that began anew (its ``_created`` is another, or it went down) gives what it has counted since, with a
    note; an engine that is gone gives nothing.
    """
    notes = [*before.notes, *after.notes]
    result: dict[tuple[tuple[str, str], ...], SpecCounters] = {}
    for key, new in after.engines.items():
        old = before.engines.get(key)
        if old is None:
            notes.append(f"{_label(key)} is new: its counters are taken from their start")
        elif _restarted(old, new):
            notes.append(f"{_label(key)} was restarted in between: what it counted before that is lost")
            old = None
        result[key] = new if old is None else _minus(new, old)
    notes += [f"{_label(key)} is gone: what it counted is lost" for key in before.engines if key not in after.engines]
    return Engines(result, tuple(dict.fromkeys(notes)))


def add_up(parts: Sequence[SpecCounters]) -> SpecCounters:
    """Sums over engines; positions are added one by one."""
    sums: dict[str, Any] = {}
    for counter in COUNTERS:
        values = [getattr(part, counter) for part in parts]
        sums[counter] = None if None in values or not values else sum(values)
    width = max((len(part.per_position) for part in parts), default=0)
    columns = [sum(p.per_position[i] for p in parts if i < len(p.per_position)) for i in range(width)]
    missing = any(not part.per_position for part in parts)
    return SpecCounters(**sums, per_position=() if missing else tuple(columns))


def breaches(found: Engines) -> list[str]:
    """Each engine whose own numbers do not fit each other, in one sentence with both values."""
    sentences = []
    for key, counters in found.engines.items():
        try:
            counters.check()
        except SemanticsError as error:
            sentences.append(f"{_label(key)}: {error}")
        accepted, drafted = counters.accepted_tokens, counters.draft_tokens
        if accepted is not None and drafted is not None and accepted > drafted:
            sentences.append(f"{_label(key)}: {_SOURCE}: accepted {accepted} is more than drafted {drafted}")
    return sentences


def gauges(exposition: Exposition) -> list[dict[str, Any]]:
    """Gauges about acceptance and cache use, each as it stands: nothing here is added up or subtracted."""
    found = []
    for name, samples in exposition.samples.items():
        vllm, sglang = name in V0_GAUGES or name.endswith("cache_usage_perc"), name.startswith("sglang:spec_")
        if not (vllm or sglang) or exposition.type_of(name) == "counter":
            continue
        for sample in samples:
            entry: dict[str, Any] = {"name": name, "labels": dict(sample.labels), "value": sample.value}
            if name in ALIASES:
                entry["now_called"] = ALIASES[name]
            if name in V0_GAUGES:
                entry["definition"] = "v0"
            found.append(entry)
    return found


def to_dict(exposition: Exposition) -> dict[str, Any]:
    """All that is known from one exposition, as plain data for JSON."""
    found = engines(exposition)
    kept = gauges(exposition)
    notes = [*exposition.faults, *found.notes]
    total = found.total
    spec = total is not None and total.drafts is not None
    if not spec:
        notes.append(_no_counters(exposition, total))
    return {
        "definition": "v1" if spec else "v0" if _is_v0(exposition, total) else None,
        "engines": [{"labels": dict(key), **counters_dict(item)} for key, item in found.engines.items()]
        if total
        else [],
        "total": counters_dict(total) if total else None,
        "breaches": breaches(found),
        "gauges": kept,
        "promql": dict(PROMQL) if spec else None,
        "notes": notes,
    }


def counters_dict(counters: SpecCounters) -> dict[str, Any]:
    """One engine's, or the total's, counters and the rates that follow from them; without what is not there."""
    content: dict[str, Any] = {
        name: getattr(counters, name) for name in COUNTERS if getattr(counters, name) is not None
    }
    if counters.per_position:
        content["per_position"] = list(counters.per_position)
    content["acceptance_rate"] = counters.acceptance_rate if counters.drafts is not None else None
    content["mean_acceptance_length"] = counters.mean_acceptance_length
    content["per_position_rates"] = list(counters.per_position_rates) or None
    return content


def _is_v0(exposition: Exposition, total: SpecCounters | None) -> bool:
    return any(name in exposition.samples for name in V0_GAUGES) or bool(total and total.emitted_tokens is not None)


def _no_counters(exposition: Exposition, total: SpecCounters | None) -> str:
    if _is_v0(exposition, total):
        return (
            "no per-step counters in this version: its gauges credit tokens behind the first miss too (definition v0)"
        )
    if any(name.startswith("sglang:") for name in exposition.samples):
        return "an sglang server: its gauges are shown as they are, they cannot be added up or subtracted"
    if any(name.startswith(("vllm:", "vllm_")) for name in exposition.samples):
        return "this server has no speculative counters: it runs without a drafter or with --disable-log-stats"
    return "none of these metrics is vLLM's"


def _named(exposition: Exposition, name: str) -> Sequence[Sample]:
    return exposition.samples.get(f"vllm:{name}") or exposition.samples.get(f"vllm_{name}") or ()


def _counter_samples(exposition: Exposition, names: Sequence[str], notes: list[str]) -> list[Sample]:
    """Counts under any of ``names``, with or without ``_total``; negative and broken ones are noted and left out."""
    for name in names:
        samples = _named(exposition, f"{name}_total") or _named(exposition, name)
        good = []
        for sample in samples:
            if exposition.type_of(sample.name) not in ("counter", "unknown", "untyped"):
                notes.append(
                    f"{sample.name} is declared as a {exposition.type_of(sample.name)}, so it is not counted with"
                )
            elif sample.value < 0 or sample.value != int(sample.value):
                notes.append(f"{sample.name} is {sample.value:g}, which is no count")
            else:
                good.append(sample)
        if good:
            return good
    return []


def _engine(sample: Sample) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, value) for key, value in sample.labels.items() if key != "position"))


def _label(key: tuple[tuple[str, str], ...]) -> str:
    labels = dict(key)
    return (
        f"engine {labels['engine']}"
        if "engine" in labels
        else "the engine " + (str(labels) if labels else "without labels")
    )


def _counters(values: dict[str, Any], notes: list[str]) -> SpecCounters:
    positions = values.pop("positions", {})
    width = max(positions, default=-1) + 1
    if len(positions) != width:
        notes.append(f"{_SOURCE}: of {width} positions only {len(positions)} are there, so none is used")
        positions, width = {}, 0
    return SpecCounters(**values, per_position=tuple(positions[i] for i in range(width)))


def _restarted(old: SpecCounters, new: SpecCounters) -> bool:
    if old.created is not None and new.created is not None and old.created != new.created:
        return True
    pairs = [(getattr(old, name), getattr(new, name)) for name in COUNTERS]
    pairs += list(zip(old.per_position, new.per_position, strict=False))
    return any(b is not None and a is not None and b < a for a, b in pairs)


def _minus(new: SpecCounters, old: SpecCounters) -> SpecCounters:
    values: dict[str, Any] = {}
    for name in COUNTERS:
        a, b = getattr(old, name), getattr(new, name)
        values[name] = None if a is None or b is None else b - a
    same = len(old.per_position) == len(new.per_position)
    columns = tuple(b - a for a, b in zip(old.per_position, new.per_position, strict=True)) if same else ()
    return SpecCounters(**values, per_position=columns, created=new.created)
