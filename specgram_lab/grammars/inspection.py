"""Whether an engine can use a grammar, found out before any model is loaded and outside of this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from specgram_lab.grammars import enforcement, findings, instances, jobs, whitespace
from specgram_lab.grammars.child import ChildLimits, CompilerSession, session
from specgram_lab.paths import DataNotFoundError
from specgram_lab.spec import Grammar, SpecError

ReasonKind = Literal["", "invalid_grammar", "grammar_timeout", "grammar_memory", "empty_language", "unsupported"]
_REGEX_SECONDS = 5.0
"""vLLM's own limit for compiling a regex (``VLLM_REGEX_COMPILATION_TIMEOUT_S``); other kinds have none."""
_PHRASES = {
    "regex": "Failed to transform regex into a grammar",
    "choice": "Failed to transform choices into a grammar",
    "json_schema": "Failed to transform json schema into a grammar",
    "ebnf": "Invalid grammar specification",
    "structural_tag": "Invalid structural tag specification",
}
"""vLLM 0.32's words in front of the compiler's."""


@dataclass(frozen=True)
class Preflight:
    """What is known of a grammar before it runs.

    ``invalid_grammar`` means that the compiler refuses it, contradictory schemas among them; ``empty_language`` that
    it compiles and no text ends it; ``unsupported`` that vLLM refuses to hand it to this backend, or that nothing is
    installed that could tell. ``accepts_finite`` is None where the search ended without an answer, and
    ``shortest_text`` the shortest text that was found. ``longest_tokens`` (by the tokenizer's own split) and
    ``longest_bytes`` are known for finite lists of texts only. Times are seconds.
    """

    ok: bool
    reason_kind: ReasonKind = ""
    reason: str = ""
    warnings: tuple[str, ...] = ()
    not_enforced: tuple[str, ...] = ()
    whitespace: whitespace.Whitespace = "none"
    compile_s: float | None = None
    fill_s: float | None = None
    accepts_finite: bool | None = None
    shortest_text: str | None = None
    longest_tokens: int | None = None
    longest_bytes: int | None = None
    installed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Settings:
    min_tokens: int
    limits: ChildLimits
    vllm: str | None


def preflight(
    grammar: Grammar, source: Path | CompilerSession, *, schemas: Sequence[Any] = (), **settings: Any
) -> Preflight:
    """Preflight of one grammar; a per-prompt grammar is looked at with each of ``schemas``, which are compiled once.

    The settings are those of `preflight_many`. For several schemas the first failure counts; warnings are joined and
    the times are the largest.

    Raises:
        SpecError: a per-prompt grammar without schemas.
        DataNotFoundError: the folder has no tokenizer.
    """
    if not grammar.per_prompt:
        return preflight_many([grammar], source, **settings)[0]
    unique = {json.dumps(schema, sort_keys=True): schema for schema in schemas if schema is not None}
    if not unique or len([schema for schema in schemas if schema is None]):
        raise SpecError(f"grammar {grammar.label} takes each prompt's schema, and a prompt has none")
    each = preflight_many([jobs.for_prompt(grammar, one) for one in unique.values()], source, **settings)
    return _joined(each)


def preflight_many(
    grammars: Sequence[Grammar],
    source: Path | CompilerSession,
    *,
    min_tokens: int = 0,
    python: str = sys.executable,
    limits: ChildLimits | None = None,
    vllm: str | None = None,
) -> list[Preflight]:
    """Preflight of several grammars in one process (a new one behind each that reaches a limit), in order.

    Args:
        grammars: none of them per-prompt.
        source: a folder that holds ``tokenizer.json``, or an open session.
        min_tokens: of the workload; more than the longest text of a finite grammar is warned of.
        python: the interpreter that has the xgrammar to be asked; a session has its own.
        limits: time and memory for each grammar.
        vllm: version of the engine that will run; default: what is installed.

    Raises:
        DataNotFoundError: the folder has no tokenizer.
    """
    folder = source if isinstance(source, Path) else source.tokenizer_folder
    if not (folder / "tokenizer.json").is_file():
        raise DataNotFoundError(f"{folder} has no tokenizer.json, the folder of a converted model is wanted")
    with session(source, python) as compiler:
        known = vllm or jobs.installed_vllm(compiler.python)
        return _many(grammars, compiler, _Settings(min_tokens, limits or ChildLimits(), known))


def _many(grammars: Sequence[Grammar], compiler: CompilerSession, settings: _Settings) -> list[Preflight]:
    early = {number: _without_compiling(grammar) for number, grammar in enumerate(grammars)}
    done = {number: found for number, found in early.items() if found is not None}
    asked = {number: _job(grammars[number], settings) for number in early if number not in done}
    report = compiler.run(list(asked.values()), settings.limits)
    for place, (number, made) in enumerate(asked.items()):
        grammar = grammars[number]
        if place < len(report.answers):
            done[number] = _judge(grammar, made, report.answers[place], report.installed, settings)
        else:
            fault = report.installed.get("fault", "the compiling process did not start")
            done[number] = Preflight(False, "unsupported", f"grammar {grammar.label} cannot be compiled here: {fault}")
    return [_fallback(grammar, done[number], compiler, settings) for number, grammar in enumerate(grammars)]


def _without_compiling(grammar: Grammar) -> Preflight | None:
    if grammar.kind == "none":
        return Preflight(True, accepts_finite=True, shortest_text="")
    mode = whitespace.whitespace_mode(grammar)
    limit = enforcement.MAX_NESTING + (enforcement.TAG_NESTING if grammar.kind == "structural_tag" else 0)
    if grammar.kind in ("json_schema", "structural_tag") and enforcement.nesting(grammar.value) > limit:
        return Preflight(
            False, "invalid_grammar", f"grammar {grammar.label}: {enforcement.NESTED_TOO_DEEPLY}", whitespace=mode
        )
    if grammar.kind == "regex" and "\x00" in str(grammar.value):
        return Preflight(False, "invalid_grammar", f"grammar {grammar.label}: regex must not contain a NUL character")
    return None


def _job(grammar: Grammar, settings: _Settings) -> dict[str, Any]:
    made = {**jobs.job(grammar, vllm=settings.vllm), "search": True}
    if grammar.kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if grammar.kind == "json_object" else grammar.value
        found, value = instances.smallest(schema)
        mode = whitespace.whitespace_mode(grammar, vllm=settings.vllm)
        forms = whitespace.dump_forms(mode)
        made["texts"] = [instances.dump(value, form) for form in forms] if found else []
        made["texts"] += [instances.dump(miss, forms[0]) for miss in instances.near_misses(schema, value, found)]
        made["own"] = len(forms) if found else 0
    made["count"] = _finite(grammar) or []
    return made


def _finite(grammar: Grammar) -> list[str] | None:
    if grammar.kind == "choice" and isinstance(grammar.value, list):
        return [str(choice) for choice in grammar.value]
    return instances.finite_texts(grammar.value) if grammar.kind == "json_schema" else None


def _judge(
    grammar: Grammar,
    made: Mapping[str, Any],
    answer: Mapping[str, Any],
    installed: Mapping[str, Any],
    settings: _Settings,
) -> Preflight:
    mode = whitespace.whitespace_mode(grammar, vllm=settings.vllm, xgrammar=installed.get("xgrammar"))
    failed = _failure(grammar, answer, settings)
    not_enforced, warnings = findings.of(grammar, made, answer, mode)
    base = Preflight(
        ok=failed is None, whitespace=mode, installed=installed, warnings=warnings, not_enforced=not_enforced,
        compile_s=answer.get("compile_s"),
    )  # fmt: skip
    if failed is not None:
        return replace(base, reason_kind=failed[0], reason=failed[1])
    base = _with_language(base, grammar, made, answer)
    base = _with_length(base, made, answer, settings.min_tokens)
    refused = findings.refused(grammar, settings.vllm or installed.get("vllm"))
    if refused and base.ok:
        reason = f"grammar {grammar.label}: {enforcement.NOT_SUPPORTED} vLLM refuses it: {'; '.join(refused)}"
        return replace(base, ok=False, reason_kind="unsupported", reason=reason)
    if grammar.kind == "regex" and (base.compile_s or 0) > _REGEX_SECONDS:
        late = f"the regex took {base.compile_s:.1f} s to compile, vLLM gives up after {_REGEX_SECONDS:.0f} s"
        return replace(base, warnings=(*base.warnings, late))
    return base


def _failure(grammar: Grammar, answer: Mapping[str, Any], settings: _Settings) -> tuple[ReasonKind, str] | None:
    name, limits = f"grammar {grammar.label}", settings.limits
    killed = answer.get("killed")
    if killed == "time":
        return "grammar_timeout", f"{name} took more than {limits.seconds:g} s to compile"
    if killed == "memory" or answer.get("memory"):
        return "grammar_memory", f"{name} took more than {limits.memory_mib} MiB to compile"
    if killed:
        return (
            "unsupported",
            f"{name} ended the compiler itself (signal {answer.get('signal')}, code {answer.get('code')})",
        )
    if "error" not in answer:
        return None
    text = findings.compiler_text(str(answer["error"]))
    if answer.get("error_type") in ("NotImplementedError", "ModuleNotFoundError", "ImportError"):
        return "unsupported", f"{name} cannot be compiled here: {text}"
    return "invalid_grammar", f"{name}: {_PHRASES.get(grammar.kind, 'Invalid grammar')}: {text}"


def _with_language(base: Preflight, grammar: Grammar, made: Mapping[str, Any], answer: Mapping[str, Any]) -> Preflight:
    search = answer["search"]
    own = zip(made.get("texts", [])[: made.get("own", 0)], answer.get("matches", []), strict=False)
    found = [text for text, (accepted, complete) in own if complete and accepted == len(text)]
    if search["text"] is not None:
        found.append(search["text"])
    base = replace(base, fill_s=search.get("fill_s"))
    if found:
        return replace(base, accepts_finite=True, shortest_text=min(found, key=len))
    if search["exhausted"]:
        reason = f"grammar {grammar.label} compiles, but no text ends it: {search['steps']} steps of search found none"
        return replace(base, ok=False, reason_kind="empty_language", reason=reason, accepts_finite=False)
    open_end = f"no text that ends the grammar was found in {search['steps']} steps of search"
    return replace(base, warnings=(*base.warnings, open_end))


def _with_length(base: Preflight, made: Mapping[str, Any], answer: Mapping[str, Any], min_tokens: int) -> Preflight:
    counts = dict(zip(made["count"], answer.get("tokens", []), strict=True))
    if not counts:
        return base
    longest = max(counts, key=lambda text: (counts[text], len(text)))
    tokens, size = counts[longest], max(len(text.encode("utf-8", "surrogatepass")) for text in counts)
    base = replace(base, longest_tokens=tokens, longest_bytes=size)
    if min_tokens <= tokens:
        return base
    # Tokens need not be split as the tokenizer does it; one byte a token is the most that a text can have.
    verb = "exceeds" if min_tokens > size else "may exceed"
    warning = f"min_tokens {min_tokens} {verb} the longest string of the grammar, {longest!r} (tokens: {tokens})"
    return replace(base, warnings=(*base.warnings, warning))


def _fallback(grammar: Grammar, found: Preflight, compiler: CompilerSession, settings: _Settings) -> Preflight:
    """With backend auto vLLM hands to guidance what xgrammar refuses."""
    if found.ok or grammar.backend != "auto" or found.reason_kind not in ("invalid_grammar", "unsupported"):
        return found
    (other,) = _many([grammar.model_copy(update={"backend": "guidance"})], compiler, settings)
    if not other.ok:
        return replace(found, warnings=(*found.warnings, f"guidance, which auto tries next: {other.reason}"))
    return replace(other, warnings=(f"auto becomes guidance: {found.reason}", *other.warnings))


def _joined(each: Sequence[Preflight]) -> Preflight:
    first = next((one for one in each if not one.ok), each[0])
    modes = {one.whitespace for one in each}
    return replace(
        first,
        warnings=tuple(dict.fromkeys(text for one in each for text in one.warnings)),
        not_enforced=tuple(dict.fromkeys(text for one in each for text in one.not_enforced)),
        whitespace=modes.pop() if len(modes) == 1 else "mixed",
        compile_s=max((one.compile_s for one in each if one.compile_s is not None), default=None),
        fill_s=max((one.fill_s for one in each if one.fill_s is not None), default=None),
    )
