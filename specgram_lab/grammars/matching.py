"""Asks a grammar's own matcher about texts and drafts, in a process of its own; no model is needed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgram_lab.grammars.child import ChildLimits, CompilerSession, run_jobs
from specgram_lab.grammars.jobs import installed_vllm, job
from specgram_lab.grammars.outputs import TextMatch
from specgram_lab.spec import Grammar


class MatcherError(RuntimeError):
    """The matcher could not be asked: not installed, the grammar does not compile, or a limit was reached."""


@dataclass(frozen=True)
class Question:
    """A grammar, the text so far, and drafts (texts, or token ids) that a drafter might propose behind it.

    ``max_whitespace`` bounds the blanks between JSON tokens (xgrammar's ``max_whitespace_cnt``).
    """

    grammar: Grammar
    prefix: str
    drafts: tuple[str | tuple[int, ...], ...] = ()
    max_whitespace: int | None = None


@dataclass(frozen=True)
class DraftMatch:
    """The tokens of a draft, and how many of them from the first on the grammar accepts (grammar-valid)."""

    token_ids: tuple[int, ...]
    valid: int


@dataclass(frozen=True)
class Replay:
    """What the grammar allows after a prefix; where the prefix itself is refused, ``legal`` is False and all is empty.

    ``allowed`` counts the token ids of the next mask, ``fill_s`` is the median time of filling it (seconds).
    """

    legal: bool
    complete: bool = False
    allowed: int = 0
    eos_allowed: bool = False
    fill_s: float = 0.0
    drafts: tuple[DraftMatch, ...] = ()


def replay(
    questions: Sequence[Question],
    source: Path | CompilerSession,
    *,
    python: str = sys.executable,
    limits: ChildLimits | None = None,
) -> list[Replay]:
    """Answer ``questions`` in order, all in one process; ``source`` is a tokenizer's folder or an open session.

    Raises:
        MatcherError: one of them cannot be answered; the message names the grammar and holds the compiler's text.
        SpecError: a grammar that has nothing to compile.
    """
    vllm = installed_vllm(python)
    jobs = []
    for question in questions:
        made = job(question.grammar, vllm=vllm)
        made |= {"prefix": question.prefix, "drafts": question.drafts, "max_whitespace": question.max_whitespace}
        jobs.append(made)
    answers = _answers(jobs, [q.grammar for q in questions], source, python, limits)
    return [_replay(answer["replay"]) for answer in answers]


@dataclass(frozen=True)
class Walk:
    """An output's token ids, the draft that might have been proposed after each, and which tokens end a text."""

    grammar: Grammar
    text: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    stops: tuple[int, ...]


def walk(asked: Sequence[Walk], source: Path | CompilerSession) -> list[list[int]]:
    """The grammar-valid length of every draft, one list an output; shorter where the grammar refuses the output itself.

    Raises:
        MatcherError: the grammar does not compile, nothing is installed that could, or a limit was reached.
        SpecError: a grammar that has nothing to compile.
    """
    vllm = installed_vllm(sys.executable)
    jobs = [
        job(one.grammar, vllm=vllm) | {"walk": one.text, "drafts": one.drafts, "stops": one.stops or None}
        for one in asked
    ]
    answers = _answers(jobs, [one.grammar for one in asked], source, sys.executable, None)
    return [list(answer["walk"]) for answer in answers]


def _replay(found: Mapping[str, Any]) -> Replay:
    if not found["legal"]:
        return Replay(legal=False)
    drafts = tuple(DraftMatch(tuple(ids), valid) for ids, valid in found["drafts"])
    return Replay(True, found["complete"], found["allowed"], found["eos_allowed"], found["fill_s"], drafts)


def validate_texts(
    grammar: Grammar,
    texts: Sequence[str],
    source: Path | CompilerSession,
    *,
    python: str = sys.executable,
    limits: ChildLimits | None = None,
) -> list[TextMatch]:
    """What the grammar's own matcher says of whole outputs; for kinds that have no independent judge.

    Raises:
        MatcherError: the grammar does not compile, nothing is installed that could, or a limit was reached.
        SpecError: a grammar that has nothing to compile.
    """
    asked = {**job(grammar, vllm=installed_vllm(python)), "texts": list(texts)}
    (answer,) = _answers([asked], [grammar], source, python, limits)
    return [TextMatch(accepted, complete) for accepted, complete in answer["matches"]]


def _answers(
    jobs: list[dict[str, Any]],
    grammars: list[Grammar],
    source: Path | CompilerSession,
    python: str,
    limits: ChildLimits | None,
) -> Sequence[Mapping[str, Any]]:
    report = run_jobs(jobs, source, python=python, limits=limits)
    if len(report.answers) < len(jobs):
        raise MatcherError(f"no matcher can be asked: {report.installed.get('fault', 'it did not start')}")
    for grammar, answer in zip(grammars, report.answers, strict=True):
        if "killed" in answer:
            raise MatcherError(f"grammar {grammar.label} reached the limit of {answer['killed']}")
        if "error" in answer or "memory" in answer:
            raise MatcherError(f"grammar {grammar.label} does not compile: {answer.get('error', 'no memory')}")
    return report.answers
