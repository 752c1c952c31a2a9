"""The check of a running server: requests sent and judged, metrics before and after, what the log got in between."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specgram_lab.servers import client, log, metrics
from specgram_lab.servers.address import Address
from specgram_lab.servers.answers import Answer, Outcome
from specgram_lab.servers.asking import Ask
from specgram_lab.servers.exposition import Exposition, MetricsError, read_metrics
from specgram_lab.servers.fetching import FetchError, fetch
from specgram_lab.servers.judging import Judged, judge

PROBE_S = 10.0
"""Limit in seconds for each look at version, models and metrics."""


@dataclass
class Seen:
    """All that a check saw. What could not be seen is None, with a sentence in ``unseen``."""

    address: Address
    model: str | None = None
    version: str | None = None
    judged: list[Judged] = field(default_factory=list)
    before: Exposition | None = None
    after: Exposition | None = None
    log: log.LogReport | None = None
    unseen: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0
    sending_s: float = 0.0

    @property
    def counted(self) -> metrics.Engines | None:
        """Counters between the two looks; None without both."""
        if self.before is None or self.after is None:
            return None
        return metrics.difference(metrics.engines(self.before), metrics.engines(self.after))

    @property
    def outcomes(self) -> Counter[str]:
        """How many requests ended how."""
        return Counter(item.answer.outcome.value for item in self.judged)

    @property
    def classes(self) -> Counter[str]:
        """How many whole answers have which class."""
        return Counter(item.verdict.kind.value for item in self.judged if item.verdict is not None)

    @property
    def finished(self) -> dict[str, int]:
        """Requests of all clients that the server counted as finished in between, by reason; empty if it does not."""
        if self.before is None or self.after is None:
            return {}
        return finished(self.before, self.after)

    @property
    def others(self) -> int:
        """Requests that the server counted as finished beyond those of the check: other clients', or earlier ones."""
        return max(0, sum(self.finished.values()) - (len(self.judged) - not_sent(self)))


def check(
    address: Address,
    asks: Sequence[Ask],
    *,
    model: str | None = None,
    log_file: Path | None = None,
    limits: client.Limits | None = None,
    answered: Callable[[Answer], None] | None = None,
) -> Seen:
    """Check the server at ``address``. Ends within ``limits.total_s`` and a few looks of `PROBE_S`, whatever it does.

    Args:
        address: where it is.
        asks: what to send.
        model: the model's name; None takes the first that the server lists.
        log_file: its log; only what is written to it during the check is read.
        limits: see `client.Limits`.
        answered: called with each answer.

    Raises:
        LogError: the log is not there at the beginning.
    """
    begin = time.monotonic()
    start = _size(log_file) if log_file is not None else 0
    seen = Seen(address, model)
    seen.version = _version(address)
    if _look_at_models(seen):
        seen.before = _metrics(seen, "before")
        bound = limits or client.Limits()
        sent = time.monotonic()
        answers = client.send(address, seen.model or "", asks, bound, answered)
        seen.sending_s = time.monotonic() - sent
        seen.judged = [judge(answer) for answer in answers]
        seen.after = _settled(seen)
    else:
        seen.judged = [Judged(Answer(ask, ()), None) for ask in asks]
    if log_file is not None:
        try:
            seen.log = log.read_log(log_file, start)
        except log.LogError as error:
            seen.unseen.append(str(error))
    prints = {item.answer.fingerprint for item in seen.judged if item.answer.fingerprint}
    if seen.version is None:
        seen.version = (seen.log.facts.get("version") if seen.log else None) or _from_fingerprint(prints)
    seen.seconds = time.monotonic() - begin
    return seen


def finished(before: Exposition, after: Exposition) -> dict[str, int]:
    """Difference of ``vllm:request_success_total`` by reason; a reason whose counter went down is left out."""
    sums: list[dict[str, float]] = []
    for exposition in (before, after):
        by_reason: dict[str, float] = {}
        for sample in exposition.samples.get("vllm:request_success_total", ()):
            reason = sample.labels.get("finished_reason", "")
            by_reason[reason] = by_reason.get(reason, 0) + sample.value
        sums.append(by_reason)
    return {
        reason: int(value - sums[0].get(reason, 0))
        for reason, value in sums[1].items()
        if value >= sums[0].get(reason, 0)
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise log.LogError(f"{path} cannot be read: {error.strerror}") from None


def _version(address: Address) -> str | None:
    try:
        content = json.loads(fetch(f"{address.root}/version", PROBE_S, address.headers()))
    except (FetchError, ValueError, RecursionError):
        return None
    version = content.get("version") if isinstance(content, dict) else None
    return version if isinstance(version, str) else None


def _from_fingerprint(prints: set[str]) -> str | None:
    """``vllm-0.32.0-86ddd031`` names the version; other servers' fingerprints do not."""
    for text in sorted(prints):
        parts = text.split("-")
        if len(parts) >= 2 and parts[0] == "vllm":
            return parts[1]
    return None


def _look_at_models(seen: Seen) -> bool:
    """Find the model's name; False where there is no API to talk to, with the reason in ``broken``."""
    address = seen.address
    try:
        text = fetch(f"{address.api}/models", PROBE_S, address.headers())
    except FetchError as error:
        if error.status in (401, 403):
            hint = "" if address.key or address.user else ": no key is set, see --help for the variables"
            seen.broken.append(address.clean(f"{error}{hint}"))
        elif error.status == 404:
            seen.broken.append(address.clean(f"{error}: this is not the address of an OpenAI-compatible server"))
        else:
            seen.broken.append(address.clean(str(error)))
        return False
    try:
        names = [item["id"] for item in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        start = address.clean(text[:60])
        seen.broken.append(f"{address.api}/models does not list models: the answer begins with {start!a}")
        return False
    if seen.model is None and names:
        seen.model = str(names[0])
    if not names and seen.model is None:
        seen.broken.append(f"{address.api}/models lists no model")
    elif seen.model not in names:
        seen.broken.append(f"the server has no model {seen.model!r}, it has {', '.join(map(str, names[:5]))}")
    return not seen.broken


def _metrics(seen: Seen, when: str) -> Exposition | None:
    try:
        return read_metrics(f"{seen.address.root}/metrics", PROBE_S, seen.address.headers())
    except MetricsError as error:
        seen.unseen.append(seen.address.clean(f"metrics {when} the requests: {error}"))
        return None


def _settled(seen: Seen) -> Exposition | None:
    """Metrics after the requests; looked at once more where a counter was caught between two others."""
    found = _metrics(seen, "after")
    if found is not None and metrics.breaches(metrics.engines(found)):
        again = _metrics(seen, "after")
        found = again if again is not None else found
    return found


def died(seen: Seen) -> bool:
    """Whether the server was there at the beginning and is not at the end."""
    lost = {Outcome.UNREACHABLE, Outcome.CUT}
    return seen.before is not None and seen.after is None and any(item.answer.outcome in lost for item in seen.judged)


def not_sent(seen: Seen) -> int:
    """Requests whose turn did not come."""
    return sum(item.answer.outcome is Outcome.NOT_SENT for item in seen.judged)


def renumbered(asks: Sequence[Ask], repeat: int) -> list[Ask]:
    """``asks`` passed ``repeat`` times, each with an id and, where it is sampled with one, a seed of its own."""
    passes = []
    for number in range(repeat):
        for index, ask in enumerate(asks):
            seed = {"seed": ask.body["seed"] + number * len(asks)} if "seed" in ask.body else {}
            own = str(number * len(asks) + index)
            passes.append(replace(ask, request_id=own, repeat=number, body={**ask.body, **seed}))
    return passes
