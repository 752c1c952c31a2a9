"""Lines about a token that a grammar refused, paired into events: a harmless probe of a draft, or a request's end.

xgrammar's wrapper logs ``Failed to advance FSM`` for both. What follows tells them apart: the scheduler's
``grammar rejected tokens`` is about committed tokens; ``... during bitmask fill`` (0.30 and later) is about a draft;
nothing at all (0.28 and older) is a draft too, because these releases speak when a committed token fails. guidance
has its own words, and says them once a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import Final, Literal, NamedTuple, get_args

from specgram_lab.servers.records import Record

Phase = Literal["draft-probe", "commit"]
PENDING: Final = 1024
"""Lines that wait for a second one at the same time, at least; the oldest of twice as many are taken for probes."""

_REQUEST = rb"for request (?P<request>\S{1,300})"
_TOKENS = rb"(?P<tokens>\[(?:-?\d{1,9}(?:, ?-?\d{1,9}){0,255})?\]|-?\d{1,9})"
_REST = rb"[^\r\n]*"
_FSM = re.compile(rb"Failed to advance FSM " + _REQUEST + rb" for tokens " + _TOKENS + rb"\. Please file" + _REST)
_FILL = re.compile(
    rb"Unexpected: grammar terminated or rejected draft token "
    + _TOKENS
    + rb" "
    + _REQUEST
    + rb" during bitmask"
    + _REST
)
_COMMIT = re.compile(
    rb"Unexpected: grammar rejected tokens "
    + _TOKENS
    + rb" "
    + _REQUEST
    + rb"\.(?P<ends> Terminating request)?"
    + _REST
)
_GUIDANCE = re.compile(rb"LLMatcher error: " + _REST)
PATTERNS: Final = {
    b"Failed to advance FSM for request ": _FSM,
    b"Unexpected: grammar terminated or rejected draft token ": _FILL,
    b"Unexpected: grammar rejected tokens ": _COMMIT,
    b"LLMatcher error: ": _GUIDANCE,
}
"""What a message about a refusal begins with, and the whole of it up to the end of its line."""


class Kind(NamedTuple):
    """What a refusal was. ``confirmed``: the engine itself named the phase. ``terminated``: the request died."""

    phase: Phase
    terminated: bool = False
    confirmed: bool = False
    backend: Literal["xgrammar", "guidance"] | None = None


_ALONE: Final = Kind("draft-probe", backend="xgrammar")
_GUIDANCE_ALONE: Final = Kind("draft-probe", backend="guidance")
_KINDS: Final = {
    (phase, ended, backend): Kind(phase, ended, confirmed=True, backend=backend)
    for phase in get_args(Phase)
    for ended in (False, True)
    for backend in (None, "xgrammar", "guidance")
}


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


Event = tuple[Kind, bytes | None, tuple[int, ...], Record, bytes]
"""What a `Refusal` holds, as long as it is only to be counted."""


class Pairing:
    """Takes the lines in their order and gives events; what may still find its second line waits, in bounded number."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str | None, int | None] | bytes, Event] = {}

    def feed(self, lines: Iterable[tuple[Record, re.Match[bytes]]]) -> list[Event]:
        """The events that lines complete, each given as its head and as one of `PATTERNS` matched it."""
        waiting = self._waiting
        found: list[Event] = []
        for head, match in lines:
            if match.re is _FSM:
                message, request, tokens = match.group(0, 1, 2)
                key: bytes | tuple[str | None, int | None] = request
                alone: Event = (_ALONE, request, _ids(tokens), head, message)
            elif match.re is _GUIDANCE:
                key = (head.process, head.pid)
                alone = (_GUIDANCE_ALONE, None, (), head, match.group())
            else:
                found.append(self._paired(head, match))
                continue
            if key in waiting:
                found.append(waiting.pop(key))
            waiting[key] = alone
            if len(waiting) > 2 * PENDING:
                found += [waiting.pop(oldest) for oldest in list(islice(waiting, PENDING))]
        return found

    def flush(self) -> list[Event]:
        """What waits, at the end of the log."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting

    def _paired(self, head: Record, match: re.Match[bytes]) -> Event:
        message, request, text = match.group(0, "request", "tokens")
        phase: Phase = "commit" if match.re is _COMMIT else "draft-probe"
        ended = match.re is _COMMIT and match["ends"] is not None
        tokens = _ids(text)
        first = self._waiting.get(request)
        if first is not None and (first[2] == tokens or set(first[2]) <= set(tokens)):
            del self._waiting[request]
        else:
            first = self._waiting.pop((head.process, head.pid), None)
        if first is None:
            return _KINDS[phase, ended, None], request, tokens, head, message
        return _KINDS[phase, ended, first[0].backend], request, first[2] or tokens, head, message


@lru_cache(maxsize=1 << 14)
def _ids(text: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(rb"-?\d{1,9}", text))
