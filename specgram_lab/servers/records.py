"""One line of an engine's log as a record: what a container, a journal, a terminal and vLLM itself put in front.

vLLM's own head is ``LEVEL MM-DD HH:MM:SS [file.py:12] ``, without brackets in V0. Processes are named in front of
it: up to 0.30 by a wrapper of the output stream, once a line, from 0.31 on by the log formatter itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_TRANSPORT = re.compile(
    r"""(?:
        \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\s+    # docker logs -t, journalctl -o short-iso
        (?:std(?:out|err)\s+[FP]\s+)?                                          # files of a Kubernetes node
        (?:[\w.-]+\s+[\w.@/+-]+(?:\[\d+\])?:\s+)?
      | [A-Z][a-z]{2}\s+\d{1,2}\s\d\d:\d\d:\d\d(?:\.\d+)?\s+[\w.-]+\s+[\w.@/+-]+(?:\[\d+\])?:\s+    # journalctl
      | [\w.-]{1,60}\s+\|\s                                                    # docker compose logs
    )""",
    re.VERBOSE,
)
_PROCESS = re.compile(r"\((?P<name>[^()\r\n]{1,120}?) pid=(?P<pid>\d{1,10})(?:, ip=[^()\s]{1,60})?\) ?")
_LEVELS = "DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL"
_HEAD = re.compile(
    rf"""(?:\((?P<name>[^()\r\n]{{1,120}}?)\ pid=(?P<pid>\d{{1,10}})(?:,\ ip=[^()\s]{{1,60}})?\)\s*)?
        (?P<level>{_LEVELS})\ (?P<time>\d\d-\d\d\ \d\d:\d\d:\d\d)\ \[?(?P<source>[^\]\[\s:]+:\d+)\]\ ?""",
    re.VERBOSE,
)
LONGEST_HEAD = 400
"""Bytes of a head that is remembered; what stands before a message in a line of JSON can be of any length."""
_OTHER = re.compile(rf"\b(?P<level>{_LEVELS})\b")
_QUOTED = re.compile(r"['\"]")


class Record(NamedTuple):
    """A log record. What its line does not say is None; ``source`` is ``file.py:12`` or a logger's name.

    ``time`` is the line's own text: vLLM writes neither year nor zone.
    """

    message: str
    process: str | None = None
    pid: int | None = None
    level: str | None = None
    time: str | None = None
    source: str | None = None


def plain(text: str) -> str:
    """``text`` without colours and other terminal sequences."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def parse_record(line: str) -> Record | None:
    """The record on a line; None where nothing is left of it but what others put in front.

    A progress bar that a carriage return ends, or that a record was written right behind, is dropped.
    """
    text = plain(line).rstrip("\r\n")
    begin, _, last = text.rpartition("\r")
    rest, process, pid = _before(last, begin)
    if rest.lstrip().startswith("{"):
        found = _json(rest)
        if found is not None:
            return _named(found, process, pid) if found.message.strip() else None
    head = _HEAD.search(rest)
    if head is None:
        return Record(rest, process, pid) if rest.strip() else None
    message = rest[head.end() :]
    return _named(_with_head(head, message), process, pid) if message.strip() else None


def head_of(before: bytes) -> Record | None:
    """The record, without its message, where ``before`` is vLLM's own head and nothing else: the fast way."""
    return _remembered(before) if len(before) <= LONGEST_HEAD else None


@lru_cache(maxsize=1 << 12)
def _remembered(before: bytes) -> Record | None:
    whole = _HEAD.fullmatch(plain(before.decode("utf-8", "replace")))
    return None if whole is None else _with_head(whole, "")


def record_at(before: str, message: str) -> Record | None:
    """The record whose message is ``message``; None where ``before`` shows that it does not begin a message.

    Args:
        before: what stands before it in its line; text that only quotes a message has no head right before it.
        message: from the message's first character to the end of the line.
    """
    text = plain(before)
    begin, _, last = text.rpartition("\r")
    rest, process, pid = _before(last, begin)
    if rest.lstrip().startswith("{"):
        found = _json(rest + message)
        return None if found is None else _named(found, process, pid)
    heads = list(_HEAD.finditer(rest))
    if heads and heads[-1].end() == len(rest):
        if len(heads) > 1 and heads[-2].end() == heads[-1].start():
            return None  # a record whose message is the line of another
        return _named(_with_head(heads[-1], message), process, pid)
    if not rest.strip():
        return Record(message, process, pid)
    level = _OTHER.search(rest)
    if level and rest[-1] in " \t:|-]" and len(rest) < 200 and not _QUOTED.search(rest):
        return Record(message, process, pid, level.group("level"))
    return None


def _before(text: str, line_begin: str) -> tuple[str, str | None, int | None]:
    """``text`` without the transport's and the processes' prefixes, and the innermost process.

    ``line_begin`` is what a carriage return separated from ``text``; the stream wrapper of 0.30 and older names the
    process there only.
    """
    name: str | None = None
    pid: int | None = None
    for piece in (line_begin, text):
        transport = _TRANSPORT.match(piece)
        at = transport.end() if transport else 0
        while found := _PROCESS.match(piece, at):
            name, pid, at = found.group("name"), int(found.group("pid")), found.end()
        rest = piece[at:]
    return rest, name, pid


def _with_head(head: re.Match[str], message: str) -> Record:
    pid = head.group("pid")
    return Record(
        message,
        head.group("name"),
        int(pid) if pid else None,
        head.group("level"),
        head.group("time"),
        head.group("source"),
    )


def _named(record: Record, process: str | None, pid: int | None) -> Record:
    return record if record.process is not None or process is None else record._replace(process=process, pid=pid)


def _json(text: str) -> Record | None:
    """A record of a JSON formatter, or the line inside a record of docker's json-file driver."""
    try:
        content, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    if isinstance(content.get("log"), str) and "stream" in content and not content["log"].lstrip().startswith('{"log"'):
        return parse_record(content["log"])
    message = _text(content, "message", "msg", "event", "MESSAGE", "textPayload")
    if message is None:
        return None
    if "MESSAGE" in content or "textPayload" in content:  # journalctl -o json, Google Cloud: a whole line inside
        return parse_record(message)
    pid = content.get("process", content.get("pid"))
    source = _text(content, "fileinfo", "filename", "name", "logger")
    line = content.get("lineno")
    return Record(
        plain(message),
        _text(content, "vllm_process_name", "processName"),
        pid if isinstance(pid, int) and not isinstance(pid, bool) else None,
        _text(content, "levelname", "level", "severity"),
        _text(content, "asctime", "timestamp", "time"),
        f"{source}:{line}" if source and isinstance(line, int) else source,
    )


def _text(content: Mapping[str, Any], *names: str) -> str | None:
    """The first of ``names`` that is a text; a lone surrogate, which JSON can spell, is escaped."""
    found = next((content[name] for name in names if isinstance(content.get(name), str)), None)
    return None if found is None else str(found).encode("utf-8", "backslashreplace").decode("utf-8")
