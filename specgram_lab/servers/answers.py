"""What a server answered to one request, attempt by attempt, and how an error of the client library is to be read."""

from __future__ import annotations

import math
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from specgram_lab.servers.asking import Ask


class Outcome(StrEnum):
    """How an attempt, or a request, ended."""

    OK = "ok"
    """An answer came and is whole; whether its text is right is another question."""
    REFUSED = "refused"
    """The server does not take these parameters (400, 413, 422)."""
    UNAUTHORISED = "unauthorised"
    """No or the wrong key (401, 403)."""
    NOT_FOUND = "not_found"
    """No such model, or no such address (404, 405)."""
    OVERLOADED = "overloaded"
    """The server has no room now (429, 503)."""
    SERVER_ERROR = "server_error"
    """The server failed (5xx, or an error in the middle of a stream): so ends a request that a grammar kills."""
    CUT = "cut"
    """The connection broke before the answer was whole."""
    TIMEOUT = "timeout"
    """No answer within the limit."""
    UNREACHABLE = "unreachable"
    """No connection."""
    TLS = "tls"
    """The connection's encryption failed: a certificate that is not trusted, or http where https was asked."""
    NOT_OPENAI = "not_openai"
    """An answer came that is none of the OpenAI API."""
    NOT_SENT = "not_sent"
    """The check had ended before its turn."""


RETRIED = frozenset({Outcome.OVERLOADED, Outcome.UNREACHABLE})
"""Where another attempt is right: the request was not begun. A request that may still run is not sent twice."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try: how it ended, after how many seconds, with which HTTP status, in the server's words."""

    outcome: Outcome
    seconds: float
    status: int | None = None
    message: str = ""


@dataclass(frozen=True)
class Call:
    """A tool call as the server gave it; ``arguments`` is text that should be JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """What became of one request. Empty where the server does not say; ``text`` holds what came before a cut."""

    ask: Ask
    attempts: tuple[Attempt, ...]
    text: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    first_token_s: float | None = None
    server_id: str | None = None
    fingerprint: str | None = None
    spec_metrics: Mapping[str, Any] | None = None

    @property
    def outcome(self) -> Outcome:
        """How the last attempt ended."""
        return self.attempts[-1].outcome if self.attempts else Outcome.NOT_SENT

    @property
    def message(self) -> str:
        """The server's or the connection's words in the last attempt."""
        return self.attempts[-1].message if self.attempts else ""


_REALS = ("mean_acceptance_length", "draft_acceptance_rate")
_COUNTS = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens")
_LISTS = ("acceptance_histogram", "per_step_accepted", "per_step_drafted")


def read_error(error: BaseException) -> tuple[Outcome, int | None, str]:
    """Outcome, HTTP status and words of an exception of `openai` or of its HTTP client."""
    status = getattr(error, "status_code", None)
    words = _body_message(error) or " ".join(str(error).split()) or type(error).__name__
    if isinstance(status, int):
        dead = "EngineCore" in words or "EngineDeadError" in words
        return (Outcome.SERVER_ERROR if dead else _by_status(status)), status, words
    chain = list(_causes(error))
    names = [type(link).__name__ for link in chain]
    deepest = next((" ".join(str(link).split()) for link in reversed(chain) if str(link).strip()), words)
    if any(isinstance(link, ssl.SSLError) or "SSL:" in str(link) for link in chain):
        return Outcome.TLS, None, deepest
    if any("ConnectError" in name or "ConnectTimeout" in name for name in names):
        return Outcome.UNREACHABLE, None, deepest
    if any("Timeout" in name for name in names):
        return Outcome.TIMEOUT, None, words
    if any(name in ("RemoteProtocolError", "ReadError", "WriteError", "ConnectionResetError") for name in names):
        garbage = any("illegal" in str(link).lower() or "invalid http" in str(link).lower() for link in chain)
        return (Outcome.NOT_OPENAI if garbage else Outcome.CUT), None, deepest
    if "APIConnectionError" in names:
        return Outcome.UNREACHABLE, None, deepest
    if any(
        name in ("JSONDecodeError", "APIResponseValidationError", "ValidationError", "UnicodeDecodeError")
        for name in names
    ):
        return Outcome.NOT_OPENAI, None, f"the answer is not the API's JSON: {words}"
    if "APIError" in names:
        return Outcome.SERVER_ERROR, None, words
    return Outcome.NOT_OPENAI, None, f"the answer cannot be read: {type(error).__name__}: {words}"


def spec_metrics(content: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The per-request speculative metrics among an answer's extra fields (0.30 and later, where they are on)."""
    metrics = (content or {}).get("metrics")
    found = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    known: dict[str, Any] = {name: _real(found.get(name)) for name in _REALS}
    known |= {name: count(found.get(name)) for name in _COUNTS}
    known |= {name: _counts(found.get(name)) for name in _LISTS}
    return {name: value for name, value in known.items() if value is not None}


def count(value: object) -> int | None:
    """``value`` if it is a count; None for everything else that a server may send in its place."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None


def _real(value: object) -> float | None:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return count(value)


def _counts(value: object) -> list[int] | None:
    numbers = [count(item) for item in value] if isinstance(value, list) else [None]
    return None if None in numbers else [number for number in numbers if number is not None]


def _by_status(status: int) -> Outcome:
    if status in (401, 403):
        return Outcome.UNAUTHORISED
    if status in (404, 405):
        return Outcome.NOT_FOUND
    if status in (429, 503):
        return Outcome.OVERLOADED
    if status in (408, 504):
        return Outcome.TIMEOUT
    return Outcome.SERVER_ERROR if status >= 500 else Outcome.REFUSED if status >= 400 else Outcome.NOT_OPENAI


def _body_message(error: BaseException) -> str:
    body = getattr(error, "body", None)
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, Mapping) else inner
        return " ".join(str(message).split()) if message else ""
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
