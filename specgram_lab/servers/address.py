"""A server's address and key: cleaned once, so that what is printed and stored never holds a secret."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field

from specgram_lab.servers.fetching import basic, is_loopback, without_credentials
from specgram_lab.spec import SpecError

KEY_VARIABLES = ("SPECGRAM_API_KEY", "OPENAI_API_KEY", "VLLM_API_KEY")
"""Environment variables that an API key is taken from; the first that is set."""


@dataclass(frozen=True)
class Address:
    """Where a server is. ``root`` has neither credentials, query nor ``/v1``; it is what may be shown."""

    root: str
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)

    @property
    def api(self) -> str:
        """The base of the OpenAI-compatible API."""
        return f"{self.root}/v1"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that must not appear anywhere."""
        encoded = basic(self.user, self.password or "").removeprefix("Basic ") if self.user is not None else None
        return tuple(text for text in (self.key, self.password, encoded) if text)

    @property
    def loopback(self) -> bool:
        """Whether the server is on this machine, where no proxy belongs in between."""
        return is_loopback(self.root)

    def headers(self) -> dict[str, str]:
        """Headers that authorise a request; user and password of the URL go before the key."""
        if self.user is not None:
            return {"Authorization": basic(self.user, self.password or "")}
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def clean(self, text: str) -> str:
        """``text`` on one line, about 500 characters, without the secrets; it can always be encoded as UTF-8."""
        for secret in self.secrets:
            text = text.replace(secret, "***").replace(urllib.parse.quote(secret, safe=""), "***")
        return " ".join(text.split())[:500].encode("utf-8", "backslashreplace").decode("utf-8")


def parse_address(url: str, environ: Mapping[str, str]) -> Address:
    """The address behind ``url``, with the key from ``environ``.

    Raises:
        SpecError: it is no http or https address of a host. The message does not repeat credentials.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not host:
        shown = url.rpartition("@")[2].partition("?")[0]
        raise SpecError(f"{shown!r} is no address of a server: http://HOST:PORT or https://HOST:PORT is wanted")
    root = without_credentials(url).rstrip("/")
    for end in ("/chat/completions", "/completions", "/metrics"):
        root = root.removesuffix(end)
    root = root.removesuffix("/v1").rstrip("/")
    key = next((environ[name] for name in KEY_VARIABLES if environ.get(name)), None)
    user = urllib.parse.unquote(parts.username) if parts.username is not None else None
    password = urllib.parse.unquote(parts.password) if parts.password is not None else None
    return Address(root, user, password, key)
