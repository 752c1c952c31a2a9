"""Lines about a token that a grammar refused, paired into events: a harmless probe of a draft, or a request's end.

xgrammar's wrapper logs ``Failed to advance FSM`` for both. What follows tells them apart: the scheduler's
``grammar rejected tokens`` is about committed tokens; ``... during bitmask fill`` (0.30 and later) is about a draft;
nothing at all (0.28 and older) is a draft too, because these releases speak when a committed token fails. guidance
has its own words, and says them once a request.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from specgram_lab.servers.records import Record

Phase = Literal["draft-probe", "commit"]
PENDING: Final = 1024
"""Lines that wait for a second one at the same time; the oldest is taken for a probe beyond that."""

_REQUEST = rb"for request (?P<request>\S{1,300})"
_TOKENS = rb"(?P<tokens>\[(?:-?\d{1,9}(?:, ?-?\d{1,9}){0,255})?\]|-?\d{1,9})"
_FSM = re.compile(rb"Failed to advance FSM " + _REQUEST + rb" for tokens " + _TOKENS + rb"\. Please file")
_FILL = re.compile(
    rb"Unexpected: grammar terminated or rejected draft token " + _TOKENS + rb" " + _REQUEST + rb" during bitmask"
)
_COMMIT = re.compile(
    rb"Unexpected: grammar rejected tokens " + _TOKENS + rb" " + _REQUEST + rb"\.(?P<ends> Terminating request)?"
)
_GUIDANCE = b"LLMatcher error: "
BEGINNINGS: Final = (b"Failed to advance FSM for request ", b"Unexpected: grammar ", _GUIDANCE)
"""What a message about a refusal begins with, each."""


class Kind(NamedTuple):
    """What a refusal was. ``confirmed``: the engine itself named the phase. ``terminated``: the request died."""

    phase: Phase
    terminated: bool = False
    confirmed: bool = False
    backend: Literal["xgrammar", "guidance"] | None = None


_ALONE: Final = Kind("draft-probe", backend="xgrammar")
_GUIDANCE_ALONE: Final = Kind("draft-probe", backend="guidance")


class Refusal(NamedTuple):
    """A grammar refused tokens. ``request`` is None and ``token_ids`` empty where guidance alone spoke.

    ``head`` is the line's record without its message: a log can be nothing but refusals, and most are only counted.
    """

    kind: Kind
    request: bytes | None
    token_ids: tuple[int, ...]
    head: Record
    message: bytes

    @property
    def record(self) -> Record:
        """The whole line."""
        return self.head._replace(message=self.message.decode("utf-8", "replace"))

    @property
    def request_id(self) -> str | None:
        """The request as text."""
        return None if self.request is None else self.request.decode("utf-8", "replace")


class Pairing:
    """Takes the lines in their order and gives events; what may still find its second line waits, in bounded number."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[str | None, int | None] | bytes, Refusal] = OrderedDict()

    def feed(self, lines: Iterable[tuple[Record, bytes]]) -> list[Refusal]:
        """The events that lines complete, each given as its head and its message."""
        waiting = self._waiting
        found: list[Refusal] = []
        for head, message in lines:
            if match := _FSM.match(message):
                request, tokens = match.groups()
                key: bytes | tuple[str | None, int | None] = request
                alone = Refusal(_ALONE, request, _ids(tokens), head, message)
            elif match := _FILL.match(message):
                found.append(self._paired(head, message, match, Kind("draft-probe", confirmed=True)))
                continue
            elif match := _COMMIT.match(message):
                ended = match["ends"] is not None
                found.append(self._paired(head, message, match, Kind("commit", terminated=ended, confirmed=True)))
                continue
            elif message.startswith(_GUIDANCE):
                key = (head.process, head.pid)
                alone = Refusal(_GUIDANCE_ALONE, None, (), head, message)
            else:
                continue
            if key in waiting:
                found.append(waiting.pop(key))
            waiting[key] = alone
            if len(waiting) > PENDING:
                found.append(waiting.popitem(last=False)[1])
        return found

    def flush(self) -> list[Refusal]:
        """What waits, at the end of the log."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting

    def _paired(self, head: Record, message: bytes, found: re.Match[bytes], kind: Kind) -> Refusal:
        request, tokens = found["request"], _ids(found["tokens"])
        first = self._waiting.get(request)
        if first is not None and set(first.token_ids) <= set(tokens):
            del self._waiting[request]
        else:
            first = self._waiting.pop((head.process, head.pid), None)
        if first is None:
            return Refusal(kind, request, tokens, head, message)
        return Refusal(kind._replace(backend=first.kind.backend), request, first.token_ids or tokens, head, message)


@lru_cache(maxsize=1 << 14)
def _ids(text: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(rb"-?\d{1,9}", text))
