"""What a look at a build's code can end in, and what a fix is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from specgram_lab.fixes.source import Source

State = Literal["contained", "replaced", "removed", "partial", "missing", "no-feature", "unknown"]
"""contained: the code that the change brought is there. replaced: that code is gone, other code does its work.
removed: what it mended is gone, so nothing is left to mend. partial: some of its parts are there. missing: it is not
there. no-feature: the build lacks the feature that it belongs to. unknown: the code has a shape that was never read."""
STATES: Final[tuple[State, ...]] = get_args(State)
GOOD: Final[frozenset[State]] = frozenset({"contained", "replaced", "removed"})
"""States in which what the change was for holds."""


@dataclass(frozen=True)
class Finding:
    """The state of one change in one build, with the place that shows it and, where it needs them, words."""

    state: State
    file: str
    symbol: str
    words: str = ""

    @property
    def good(self) -> bool:
        """Whether what the change was for holds in this build."""
        return self.state in GOOD


@dataclass(frozen=True)
class Fix:
    """A change of vLLM that matters for drafts under a grammar.

    ``reference`` is where it was discussed, ``reports`` which of R0 to R4 it belongs to, and ``detect`` looks for it.
    """

    name: str
    about: str
    reference: str
    reports: tuple[str, ...]
    detect: Callable[[Source], Finding]
