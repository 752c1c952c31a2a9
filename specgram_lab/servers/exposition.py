"""A Prometheus exposition as samples, read with `prometheus_client`'s parser; what is damaged is named, not guessed."""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from specgram_lab.servers.fetching import FetchError, fetch, without_credentials

_TYPE = re.compile(r"^#[ \t]+TYPE[ \t]+(\S+)[ \t]+(\w+)[ \t]*$", re.MULTILINE)
_LINE = re.compile(r"[^\n]*\n?")


class MetricsError(ValueError):
    """Metrics that cannot be had, said in one sentence."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One number: its name as it stands, labels, value (finite)."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Name and labels, for comparing."""
        return self.name, tuple(sorted(self.labels.items()))


@dataclass(frozen=True)
class Exposition:
    """Samples by name, the declared types by family, and what could not be read (a sentence each, at most 20)."""

    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    def type_of(self, name: str) -> str:
        """The type that a sample's family was declared with; ``unknown`` without a declaration."""
        return self.types.get(name) or self.types.get(name.removesuffix("_total")) or "unknown"


def parse_exposition(text: str) -> Exposition:
    """Read ``text``. Never raises: a line that is no sample is named in ``faults`` and left out.

    Left out too are a sample that stands there twice (neither of the two can be trusted), values that are not finite
    where a count is wanted (histogram bounds apart) and everything that the parser itself refuses.
    """
    faults: list[str] = []
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    doubled: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for sample in _parsed(text, faults):
        if not math.isfinite(sample.value):
            faults.append(f"{sample.name} has the value {sample.value}, which is no number")
        elif sample.key in found:
            doubled.add(sample.key)
        else:
            found[sample.key] = sample
    for key in doubled:
        faults.append(f"{key[0]} stands there twice with the same labels, so none of its values is used")
        del found[key]
    samples: dict[str, list[Sample]] = {}
    for sample in found.values():
        samples.setdefault(sample.name, []).append(sample)
    types: dict[str, str] = dict(_TYPE.findall(text))
    return Exposition({name: tuple(items) for name, items in samples.items()}, types, tuple(faults[:20]))


def _parsed(text: str, faults: list[str]) -> Iterable[Sample]:
    try:
        return list(_samples(text))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        pass  # line by line, so that one bad line costs only itself
    samples: list[Sample] = []
    for number, match in enumerate(_LINE.finditer(text), start=1):
        line = match.group()
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            samples += _samples(line)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            faults.append(f"line {number} is no sample: {line.strip()[:80]!a}")
    return samples


def _samples(text: str) -> Iterable[Sample]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield Sample(sample.name, dict(sample.labels), float(sample.value))


def read_metrics(source: str, timeout_s: float = 10.0, headers: Mapping[str, str] | None = None) -> Exposition:
    """The exposition in a file, or behind a URL (``/metrics`` is added where it names a server only).

    Raises:
        MetricsError: it cannot be had, or is a page of something else.
    """
    if not re.match(r"https?://", source):
        try:
            text = Path(source).read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise MetricsError(f"{source} cannot be read: {error.strerror}") from None
        return _checked(text, source)
    try:
        text = fetch(metrics_url(source), timeout_s, headers)
    except FetchError as error:
        raise MetricsError(str(error)) from None
    return _checked(text, without_credentials(source))


def metrics_url(url: str) -> str:
    """The address of a server's metrics: ``/metrics`` beside its API, or the address itself if it names metrics."""
    parts = urllib.parse.urlsplit(url)
    path = parts.path.rstrip("/")
    if not path.endswith("/metrics"):
        path = path.removesuffix("/v1") + "/metrics"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _checked(text: str, source: str) -> Exposition:
    exposition = parse_exposition(text)
    if not exposition.samples:
        start = " ".join(text.split())[:60]
        raise MetricsError(
            f"{source} holds no Prometheus metrics: {f'it begins with {start!a}' if start else 'it is empty'}"
        )
    return exposition
