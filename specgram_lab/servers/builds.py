"""What a vLLM build contains, told from its version, and from what it says and sends where that is better evidence.

The table was read off the released wheels of 0.28, 0.30, 0.31, 0.32 and 0.33; between two of them, and for builds of
a branch, nothing is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_READ: Final = ((0, 28), (0, 30), (0, 31), (0, 32), (0, 33))


@dataclass(frozen=True)
class Change:
    """A change of vLLM: what it does, where it was discussed, and the releases of those read that have it.

    ``meaning`` is what its absence means for somebody who runs the build.
    """

    name: str
    about: str
    reference: str
    since: tuple[int, int] | None
    meaning: str


CHANGES: Final[tuple[Change, ...]] = (
    Change("stops-at-end", "xgrammar is not advanced beyond the end of the output", "vllm#52805", (0, 30),
           "tokens behind the end of an output can end a request with an error"),
    Change("draft-probe-named", "a refused draft is named as such in the log", "vllm#48200", (0, 30),
           "a line 'Failed to advance FSM' with no 'Terminating request' behind it is a harmless draft"),
    Change("per-request-metrics", "speculative metrics in each answer", "vllm#48915", (0, 30),
           "acceptance is known per server only"),
    Change("masks-after-refusal", "what follows a refused draft stays under the grammar", "source of 0.31", (0, 31),
           "outputs should be validated by the caller"),
    Change("pipeline-async-refused", "pipeline parallelism with async scheduling is refused on runner V1", "vllm#56250",
           (0, 31), "with pipeline parallelism switch async scheduling off"),
    Change("unseen-drafts-invalid", "drafts that the grammar has not seen are not accepted (runner V2)", "vllm#54442",
           (0, 32), "outputs should be validated by the caller"),
    Change("compact-separators", "disable_any_whitespace gives compact JSON", "vllm#58067", (0, 32),
           "disable_any_whitespace asks for a space behind ':' and ','"),
    Change("verified-counter", "drafted as proposed, verified counted", "vllm#64156", None,
           "drafted leaves grammar-invalid drafts out, and what adaptive verification skipped is counted as drafted"),
    Change("bounded-whitespace", "blanks between JSON tokens are bounded", "vllm#44619", None,
           "a model may print blanks up to max_tokens; bound the length of strings and set max_tokens"),
)  # fmt: skip


def release(version: str | None) -> tuple[int, int] | None:
    """(major, minor) of a released version; None for anything else (a build of a branch, a release candidate)."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?(?:\+(?:cpu|cu\d+|rocm[\d.]*))?", version or "")
    return (int(found[1]), int(found[2])) if found else None


def contains(change: Change, version: str | None) -> bool | None:
    """Whether the build has the change; None where it cannot be told from the version."""
    build = release(version)
    if build is None or build > _READ[-1]:
        return None
    if change.since is None:
        return False
    if build >= change.since:
        return True
    earlier = [known for known in _READ if known < change.since]
    return False if earlier and build <= earlier[-1] else None


def survey(version: str | None, seen: Mapping[str, bool]) -> list[dict[str, object]]:
    """Every change with ``contained`` (True, False, None) and ``known_by``; ``seen`` is evidence by a change's name."""
    rows: list[dict[str, object]] = []
    for change in CHANGES:
        evident = seen.get(change.name, False)
        contained = True if evident else contains(change, version)
        by = "seen" if evident else f"version {version}" if contained is not None else ""
        rows.append(
            {
                "name": change.name,
                "about": change.about,
                "reference": change.reference,
                "contained": contained,
                "known_by": by,
            }
        )
    return rows
