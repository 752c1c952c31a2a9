"""Lines about a token that a grammar refused, paired into events: a harmless probe of a draft, or a request's end.

xgrammar's wrapper logs ``Failed to advance FSM`` for both. What follows tells them apart: the scheduler's
``grammar rejected tokens`` is about committed tokens; ``... during bitmask fill`` (0.30 and later) is about a draft;
nothing at all (0.28 and older) is a draft too, because these releases speak when a committed token fails. guidance
has its own words, and says them once a request.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from specgram_lab.servers.records import Record

Phase = Literal["draft-probe", "commit"]
PENDING: Final = 1024
"""Lines that wait for a second one at the same time; the oldest is taken for a probe beyond that."""

_REQUEST = r"for request (?P<request>\S{1,300})"
_TOKENS = r"(?P<tokens>\[(?:-?\d{1,9}(?:, ?-?\d{1,9}){0,255})?\]|-?\d{1,9})"
_FSM = re.compile(rf"Failed to advance FSM {_REQUEST} for tokens {_TOKENS}\. Please file")
_FILL = re.compile(rf"Unexpected: grammar terminated or rejected draft token {_TOKENS} {_REQUEST} during bitmask")
_COMMIT = re.compile(rf"Unexpected: grammar rejected tokens {_TOKENS} {_REQUEST}\.(?P<ends> Terminating request)?")
_GUIDANCE = re.compile(r"LLMatcher error: ")


class Refusal(NamedTuple):
    """A grammar refused tokens. ``confirmed``: the engine itself said which phase it was.

    ``terminated``: the request died of it. ``request_id`` is None and ``token_ids`` empty where guidance alone spoke.
    """

    phase: Phase
    request_id: str | None
    token_ids: tuple[int, ...]
    terminated: bool
    confirmed: bool
    backend: Literal["xgrammar", "guidance"] | None
    record: Record


class Pairing:
    """Takes the lines in their order and gives events; what may still find its second line waits, in bounded number."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[str, str], Refusal] = OrderedDict()

    def feed(self, record: Record) -> Iterator[Refusal]:
        """The events that ``record`` completes; nothing if it is not about a refusal."""
        message = record.message
        if found := _FSM.match(message):
            alone = Refusal("draft-probe", found["request"], _ids(found["tokens"]), False, False, "xgrammar", record)
            yield from self._wait(("request", found["request"]), alone)
        elif found := _FILL.match(message):
            yield self._paired(record, "draft-probe", found, terminated=False)
        elif found := _COMMIT.match(message):
            yield self._paired(record, "commit", found, terminated=found["ends"] is not None)
        elif _GUIDANCE.match(message):
            alone = Refusal("draft-probe", None, (), False, False, "guidance", record)
            yield from self._wait(("process", _process(record)), alone)

    def flush(self) -> Iterator[Refusal]:
        """What waits, at the end of the log."""
        yield from self._waiting.values()
        self._waiting.clear()

    def _wait(self, key: tuple[str, str], refusal: Refusal) -> Iterator[Refusal]:
        before = self._waiting.pop(key, None)
        if before is not None:
            yield before
        self._waiting[key] = refusal
        if len(self._waiting) > PENDING:
            yield self._waiting.popitem(last=False)[1]

    def _paired(self, record: Record, phase: Phase, found: re.Match[str], *, terminated: bool) -> Refusal:
        request, tokens = found["request"], _ids(found["tokens"])
        first = self._waiting.get(("request", request))
        if first is not None and set(first.token_ids) <= set(tokens):
            del self._waiting[("request", request)]
        else:
            first = self._waiting.pop(("process", _process(record)), None)
        tokens = first.token_ids if first is not None and first.token_ids else tokens
        return Refusal(phase, request, tokens, terminated, True, first.backend if first else None, record)


def _process(record: Record) -> str:
    return f"{record.process}/{record.pid}"


def _ids(text: str) -> tuple[int, ...]:
    if text.isdecimal():
        return (int(text),)
    return tuple(int(part) for part in re.findall(r"-?\d{1,9}", text))
