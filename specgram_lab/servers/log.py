"""A vLLM log of any length as a report: refusals by phase, requests that died, acceptance lines, what the engine is.

The file is read in blocks. Lines that hold none of a few fixed texts are never looked at, which is what makes
gigabytes bearable; a line that does is parsed in full.
"""

from __future__ import annotations

import codecs
import gzip
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from specgram_lab.servers.records import Record, head_of, record_at
from specgram_lab.servers.refusals import PATTERNS, Event, Kind, Pairing, Refusal
from specgram_lab.servers.speclines import Acceptance, parse_spec_line

BLOCK: Final = 1 << 16
"""Bytes read at a time: few enough that looking for one text after the other stays in the processor's cache."""
LINE: Final = 1 << 18
"""Bytes of one line that are looked at behind a hit, and kept of a line that has not ended yet."""
KEPT: Final = 1000
"""Events that a report holds; all are counted."""
DISTINCT: Final = 100_000
"""Requests and tokens that are told apart; beyond that the report says "at least"."""

FAILURES: Final = 20
"""Lines about an engine's end that a report holds."""

_LINES = (b"SpecDecoding metrics: ", b"Speculative metrics: ")
_DEATHS = (
    b"EngineCore encountered a fatal error", b"EngineCore hit an exception", b"EngineDeadError", b"died unexpectedly",
    b"Counters can only be incremented by non-negative amounts",
)  # fmt: skip
_FACTS = {
    b"Initializing a V": re.compile(r"Initializing a V(?P<engine>\d) LLM engine \(v(?P<version>[^)\s]{1,80})\)"),
    b"LLM engine version ": re.compile(r"LLM engine version (?P<version>[^\s,]{1,80})"),
    b"API server version ": re.compile(r"API server version (?P<version>[^\s,]{1,80})"),
    b"speculative_config=SpeculativeConfig(": re.compile(
        r"speculative_config=SpeculativeConfig\(method='?(?P<method>\w{1,40})'?.{0,400}?num_spec_tokens=(?P<k>\d{1,4})\)"
    ),
    b"Asynchronous scheduling is ": re.compile(r"Asynchronous scheduling is (?P<async>enabled|disabled)"),
    b"Async scheduling not supported with ": re.compile(r"(?P<async>Async scheduling not supported)"),
    b"Model Runner V2": re.compile(r"(?P<runner>(?:Using|Enabled) (?:the )?(?:GPU )?Model Runner V2)", re.IGNORECASE),
}
_LEFT_OUT = b" blob data]"
_BLOB = re.compile(rb"\[[\d.]+[KMG]?B? blob data\]")
_NEEDLES = (*_LINES, *_DEATHS, *_FACTS, _LEFT_OUT)


class LogError(ValueError):
    """A log that cannot be read, said in one sentence."""


@dataclass
class LogReport:
    """What a log says. Numbers are None where the log has no line about them.

    ``events`` are the first `KEPT` refusals; the counts are of all. ``facts`` is what the engine said of itself:
    version, method, k, async, runner; the last word counts. ``failures`` are the first lines about an engine's end.
    """

    bytes_read: int = 0
    lines: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    requests: set[bytes] = field(default_factory=set)
    more_requests: bool = False
    events: list[Refusal] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    failures: list[Record] = field(default_factory=list)
    failure_lines: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    blobs: int = 0

    def add(self, events: Sequence[Event]) -> None:
        """Count refusals, in their order."""
        self.events += map(Refusal._make, events[: KEPT - len(self.events)])
        self.kinds.update([event[0] for event in events])
        requests = {event[1] for event in events if event[1] is not None} - self.requests
        room = DISTINCT - len(self.requests)
        self.more_requests |= len(requests) > room
        self.requests.update(islice(requests, room))
        tokens = Counter([event[2][0] for event in events if event[2]])
        new = [token for token in tokens if token not in self.tokens]
        for token in new[DISTINCT - len(self.tokens) :]:
            del tokens[token]
        self.tokens.update(tokens)

    @property
    def phases(self) -> Counter[str]:
        """Refusals by phase."""
        found: Counter[str] = Counter()
        for kind, count in self.kinds.items():
            found[kind.phase] += count
        return found

    @property
    def unconfirmed(self) -> int:
        """Refusals whose phase the engine did not say."""
        return sum(count for kind, count in self.kinds.items() if not kind.confirmed)

    @property
    def terminated(self) -> int:
        """Refusals that ended a request."""
        return sum(count for kind, count in self.kinds.items() if kind.terminated)

    @property
    def guidance(self) -> int:
        """Refusals of the backend guidance."""
        return sum(count for kind, count in self.kinds.items() if kind.backend == "guidance")

    @property
    def notes(self) -> list[str]:
        """What the reader of the numbers should know, a sentence each."""
        found = []
        if self.blobs:
            found.append(
                f"journalctl left out {self.blobs} records as blob data: export the log again with journalctl --all"
            )
        if self.acceptance.damaged_lines:
            found.append(
                f"{self.acceptance.damaged_lines} acceptance lines contradict themselves and are in no sum, the first:"
                f" {self.acceptance.damaged[0]}"
            )
        if self.more_requests:
            found.append(f"more than {DISTINCT} requests had a refusal; those beyond were not told apart")
        return found


def read_log(path: Path, start: int = 0) -> LogReport:
    """Read the log from byte ``start`` on (plain, gzip, or UTF-16 as PowerShell writes it).

    Raises:
        LogError: the file cannot be read, or is shorter than ``start``.
    """
    try:
        with path.open("rb") as raw:
            magic = raw.read(2)
            size = raw.seek(0, 2)
            if start > size:
                raise LogError(f"{path} has {size} bytes now and had {start} before: it was cut or rotated")
            raw.seek(start)
            if magic == b"\x1f\x8b":
                if start:
                    raise LogError(f"{path} is compressed; it can be read as a whole only")
                return scan(cast("BinaryIO", gzip.GzipFile(fileobj=raw)))
            if magic in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                return scan(cast("BinaryIO", codecs.EncodedFile(raw, "utf-8", "utf-16", "replace")))
            return scan(raw)
    except (OSError, EOFError) as error:
        raise LogError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def scan(stream: BinaryIO) -> LogReport:
    """Read ``stream`` to its end in bounded memory. Never raises for any content."""
    report, pairing = LogReport(), Pairing()
    rest = b""
    while block := stream.read(BLOCK):
        report.bytes_read += len(block)
        report.lines += block.count(b"\n")
        data = rest + block if rest else block
        end = _last_end(data)
        if not end and len(data) > LINE:  # a bar without an end: its last state is all that counts
            end = max(data.rfind(b"\r") + 1, len(data) - LINE)
        _scan_block(data[:end], report, pairing)
        rest = data[end:]
    _scan_block(rest, report, pairing)
    report.add(pairing.flush())
    return report


def _last_end(data: bytes) -> int:
    """Where the last whole record of ``data`` ends: vLLM parts the lines of one by ``\\r\\n``; 0 if there is none."""
    last = end = data.rfind(b"\n") + 1
    while end > 1 and data[end - 2] == 0x0D:
        end = data.rfind(b"\n", 0, end - 1) + 1
    return end or last  # a file from Windows has no other ends


def _scan_block(data: bytes, report: LogReport, pairing: Pairing) -> None:
    # carriage returns: progress bars, records of several lines, or, where they are everywhere, a file from Windows
    parts = b"\r" in data and data.count(b"\r\n") != data.count(b"\n")
    report.add(pairing.feed(_refused(data, parts)))
    for at, needle in sorted((at, text) for text in _NEEDLES for at in _all(data, text)):
        begin, end = _bounds(data, at)
        if needle in _LINES:
            record = None if parts and _goes_on(data, begin, at) else _record(data[begin:at], data[at:end])
            line = parse_spec_line(record.message) if record is not None else None
            if record is not None and line is not None:
                report.acceptance.add(line, f"{record.process}/{record.pid}")
        elif needle in _FACTS:
            fact = _FACTS[needle].search(_text(data[at:end]))
            report.facts.update({key: value for key, value in (fact.groupdict() if fact else {}).items() if value})
        elif needle == _LEFT_OUT:
            report.blobs += _BLOB.search(data, max(0, at - 16), at + len(needle)) is not None
        else:
            report.failure_lines += 1
            if len(report.failures) < FAILURES:
                report.failures.append(_record(data[begin:at], data[at:end]) or Record(_text(data[at:end])))


def _refused(data: bytes, parts: bool) -> Iterator[tuple[Record, re.Match[bytes]]]:
    """Lines about refused tokens. ``parts``: some of the lines may belong to a record of several."""
    present = [shape.finditer(data) for needle, shape in PATTERNS.items() if needle in data]
    for match in present[0] if len(present) == 1 else sorted(chain(*present), key=re.Match.start):
        at = match.start()
        low = at - LINE if at > LINE else 0
        begin = data.rfind(b"\n", low, at) + 1 or low
        if parts and _goes_on(data, begin, at):
            continue
        head = head_of(data[begin:at])
        if head is not None:
            yield head, match
        elif (record := record_at(_text(data[begin:at]), _text(match.group()))) is not None:
            inner = match.re.match(record.message.encode("utf-8", "replace"))
            if inner is not None:
                yield record, inner


def _bounds(data: bytes, at: int) -> tuple[int, int]:
    """Where the line around ``at`` begins and ends; a carriage return behind ``at`` ends it too."""
    low = max(0, at - LINE)
    end = data.find(b"\n", at, at + LINE)
    end = end if end >= 0 else min(len(data), at + LINE)
    bar = data.find(b"\r", at, end)
    return data.rfind(b"\n", low, at) + 1 or low, bar if bar >= 0 else end


def _record(before: bytes, message: bytes) -> Record | None:
    head = head_of(before)
    return record_at(_text(before), _text(message)) if head is None else head._replace(message=_text(message))


def _goes_on(data: bytes, begin: int, at: int) -> bool:
    """Whether the line is not the first of its record: vLLM joins its lines with ``\\r\\n`` and its head again."""
    head = data[begin:at]
    before = data.rfind(b"\n", 0, max(0, begin - 1)) + 1
    return bool(head) and data[begin - 2 : begin] == b"\r\n" and data.startswith(head, before)


def _all(data: bytes, needle: bytes) -> Iterator[int]:
    at = data.find(needle)
    while at >= 0:
        yield at
        at = data.find(needle, at + len(needle))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def to_dict(report: LogReport, events: int = 20) -> dict[str, Any]:
    """The report as plain data for JSON, with the first ``events`` refusals."""
    return {
        "bytes": report.bytes_read,
        "lines": report.lines,
        "engine": dict(sorted(report.facts.items())),
        "fsm_events": {
            "draft-probe": report.phases["draft-probe"],
            "commit": report.phases["commit"],
            "terminated_requests": report.terminated,
            "requests": len(report.requests),
            "unconfirmed": report.unconfirmed,
            "guidance": report.guidance,
            "tokens": [{"token_id": token, "count": count} for token, count in report.tokens.most_common(10)],
        },
        "acceptance": report.acceptance.to_dict(),
        "engine_failures": {"lines": report.failure_lines, "first": [r.message[:300] for r in report.failures[:5]]},
        "notes": report.notes,
        "events": [_event(event) for event in report.events[:events]],
    }


def _event(event: Refusal) -> dict[str, Any]:
    record = event.record
    return {
        "phase": event.kind.phase, "request_id": event.request_id, "token_ids": list(event.token_ids),
        "terminated": event.kind.terminated, "confirmed": event.kind.confirmed, "backend": event.kind.backend,
        "process": record.process, "pid": record.pid, "level": record.level, "time": record.time,
        "source": record.source, "message": record.message[:500],
    }  # fmt: skip
