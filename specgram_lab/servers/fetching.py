"""One GET, bounded in time and size, whose errors are one sentence without credentials."""

from __future__ import annotations

import base64
import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPMessage
from typing import IO

MOST_BYTES = 64 << 20
"""An answer beyond this is not read: no server's metrics are that long."""


class FetchError(ValueError):
    """An address that gives nothing usable, said in one sentence. ``status`` is the HTTP status, where one came."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


def without_credentials(url: str) -> str:
    """``url`` as it may be printed and stored: no user, no password, no query, no fragment."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def is_loopback(url: str) -> bool:
    """Whether ``url`` names this machine."""
    host = urllib.parse.urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Follows no redirection to another server: the key would go with it."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            raise urllib.error.URLError(f"it redirects to {without_credentials(newurl)}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def basic(user: str, password: str) -> str:
    """The header of a user and a password."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def fetch(url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> str:
    """The text behind an http or https ``url``; user and password in it are sent as such and never shown.

    Raises:
        FetchError: no connection, no answer within ``timeout_s``, an error status, more than `MOST_BYTES`.
    """
    parts = urllib.parse.urlsplit(url)
    shown = without_credentials(url)
    if parts.scheme not in ("http", "https"):
        raise FetchError(f"{shown} is neither an http nor an https address")
    bare = urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))
    request = urllib.request.Request(bare, headers=dict(headers or {}))  # noqa: S310  the scheme was looked at
    if parts.username is not None:
        user, password = urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
        request.add_header("Authorization", basic(user, password))
    try:
        return _read(request, timeout_s).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(f"{shown} answers with {error.code} {error.reason}", error.code) from None
    except urllib.error.URLError as error:
        raise FetchError(f"{shown} cannot be reached: {error.reason}") from None
    except TimeoutError:
        raise FetchError(f"{shown} gave no whole answer within {timeout_s:g} s") from None
    except http.client.HTTPException as error:
        raise FetchError(f"{shown} does not speak HTTP: {type(error).__name__}") from None
    except (OSError, ValueError) as error:
        raise FetchError(f"{shown} cannot be read: {error or type(error).__name__}") from None


def _read(request: urllib.request.Request, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    pieces: list[bytes] = []
    size = 0
    handlers: list[urllib.request.BaseHandler] = [_SameServer()]
    if is_loopback(request.full_url):
        handlers.append(urllib.request.ProxyHandler({}))
    with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
        while piece := answer.read1(1 << 16):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_BYTES:
                raise ValueError(f"it sends more than {MOST_BYTES >> 20} MiB")
            if time.monotonic() > deadline:  # the socket's own limit is for each piece
                raise TimeoutError
    return b"".join(pieces)
