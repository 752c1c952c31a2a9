"""Detectors for scheduler and grammar: what a build's structured output manager and xgrammar backend do.

Each looks for the structure that makes the behaviour, in the symbol that has it, and says so when it finds another
shape than the ones that were read in the releases of the table.
"""

from __future__ import annotations

import ast

from specgram_lab.fixes.finding import Finding, State
from specgram_lab.fixes.shapes import branches, called, fields, in_order, keywords, names, returns, says
from specgram_lab.fixes.source import MANAGER, Source

XGRAMMAR = "v1/structured_output/backend_xgrammar.py"
SCHEDULER = "v1/core/sched/scheduler.py"
OUTPUT = "v1/core/sched/output.py"
STRUCTURED_CONFIG = "config/structured_outputs.py"
FILL = "StructuredOutputManager.grammar_bitmask"
REWRITE = "rewritten by vllm#48200"


def found(state: State, path: str, symbol: str, words: str = "") -> Finding:
    """A finding, its file named as it lies beside the package."""
    return Finding(state, f"vllm/{path}", symbol, words)


def look(source: Source, path: str, symbol: str) -> ast.AST | None:
    """A symbol of a build; None if it or its file is not there."""
    module = source.module(path)
    return module.find(symbol) if module else None


def manager_checks(source: Source) -> bool:
    """Whether the manager validates drafts and feeds committed tokens itself, and the scheduler leaves both to it."""
    own = {
        name: look(source, MANAGER, f"StructuredOutputManager.{name}")
        for name in ("validate_tokens", "accept_tokens", "should_advance", "should_fill_bitmask")
    }
    asked = {
        "update_draft_token_ids": "validate_tokens",
        "update_draft_token_ids_in_output": "validate_tokens",
        "update_from_output": "accept_tokens",
    }
    return (
        own["validate_tokens"] is not None
        and "reasoning_ended" in names(own["accept_tokens"])
        and own["should_advance"] is own["should_fill_bitmask"] is None
        and all(method in called(look(source, SCHEDULER, f"Scheduler.{name}")) for name, method in asked.items())
    )


def reasoning_end(source: Source) -> Finding:
    """#44297: a reasoning end inside a draft window; masks behind it, and only content fed to the grammar."""
    if manager_checks(source):
        free = "seen_padding" in names(look(source, MANAGER, FILL))
        words = REWRITE + ("; behind a refused draft the bonus token's row is free again" if free else "")
        return found("replaced", MANAGER, "StructuredOutputManager.accept_tokens", words)
    trims = look(source, MANAGER, "StructuredOutputManager.trim_reasoning_for_advance")
    detects = "is_reasoning_end_streaming" in called(look(source, MANAGER, FILL))
    if trims and detects:
        return found("contained", MANAGER, "StructuredOutputManager.trim_reasoning_for_advance")
    if trims or detects:
        return found("partial", MANAGER, FILL, "only the mask" if detects else "only the tokens fed to the grammar")
    return found("missing", MANAGER, FILL)


def one_boundary(source: Source) -> Finding:
    """#44993: the boundary is found in the same way for every kind of constraint."""
    if manager_checks(source):
        return found("replaced", MANAGER, "StructuredOutputManager.accept_tokens", REWRITE)
    symbol = "StructuredOutputManager.should_advance"
    advance = look(source, MANAGER, symbol)
    if advance is None:
        return found("unknown", MANAGER, symbol, "neither the old nor the new way to advance")
    ends = [branch for branch in branches(advance, "is_reasoning_end_streaming") if returns(branch, True)]
    by_kind = names(advance) & {"StructuredOutputOptions", "structured_output_key", "request_type"}
    if ends and not by_kind and "reasoning_end_token_index" in names(advance):
        return found("contained", MANAGER, symbol)
    return found("missing", MANAGER, symbol)


def stops_at_end(source: Source) -> Finding:
    """#52805: nothing is fed to xgrammar behind the end; validation stops there; a reset clears it."""
    symbol = "XgrammarGrammar.accept_tokens"
    accept = look(source, XGRAMMAR, symbol)
    if accept is None:
        return found("unknown", XGRAMMAR, symbol, "no such method")
    validate = look(source, XGRAMMAR, "XgrammarGrammar.validate_tokens")
    reset = look(source, XGRAMMAR, "XgrammarGrammar.reset")
    parts = {
        "accept_tokens": any(returns(b, True) for b in branches(accept, "_is_terminated")),
        "validate_tokens": bool(branches(validate, "_is_terminated") or branches(validate, "is_terminated")),
        "reset": "_is_terminated" in names(reset),
    }
    if all(parts.values()):
        return found("contained", XGRAMMAR, symbol)
    there = [name for name, is_there in parts.items() if is_there]
    return (
        found("partial", XGRAMMAR, symbol, "only in " + ", ".join(there))
        if there
        else found("missing", XGRAMMAR, symbol)
    )


def probe_guard(source: Source) -> Finding:
    """#53046: a draft behind a reasoning end is asked about before it is fed to the grammar."""
    if manager_checks(source):
        words = "by vllm#48200: drafts behind a reasoning end are validated before masks are made"
        return found("replaced", MANAGER, "StructuredOutputManager.validate_tokens", words)
    calls = called(look(source, MANAGER, FILL))
    if "accept_tokens" not in calls:
        return found("unknown", MANAGER, FILL, "the masks are made without feeding drafts to the grammar")
    if "is_reasoning_end_streaming" not in calls:
        return found("no-feature", MANAGER, FILL, "masks are made without looking for a reasoning end")
    guarded = "validate_tokens" in calls[: calls.index("accept_tokens")]
    return found("contained" if guarded else "missing", MANAGER, FILL)


def manager_validates(source: Source) -> Finding:
    """#48200: the manager validates drafts and feeds committed tokens, reasoning or not."""
    state: State = "contained" if manager_checks(source) else "missing"
    return found(state, MANAGER, "StructuredOutputManager.validate_tokens")


def refusal_logged(source: Source) -> Finding:
    """#48200: a draft that the grammar refuses while masks are made is logged, not asserted."""
    fill = look(source, MANAGER, FILL)
    asserts = any(
        (isinstance(node, ast.Raise) and "AssertionError" in names(node))
        or (isinstance(node, ast.Assert) and {"accepted", "accept_tokens"} & names(node.test))
        for node in in_order(fill)
    )
    if asserts:
        return found("missing", MANAGER, FILL, "raises AssertionError")
    if says(fill, "rejected draft") and "error" in called(fill):
        return found("contained", MANAGER, FILL)
    return found("unknown", MANAGER, FILL, "neither an assertion nor a log line")


def rows_after_refusal(source: Source) -> Finding:
    """0.31: rows behind a refused draft repeat its row instead of letting everything through."""
    fill = look(source, MANAGER, FILL)
    copies = [
        node
        for node in in_order(fill)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "copy_"
        if node.args and isinstance(node.args[0], ast.Subscript)
    ]
    return found("contained" if copies else "missing", MANAGER, FILL)


def implicit_end(source: Source) -> Finding:
    """0.32: a content token that ends the reasoning, such as a tool call's start, is fed to the grammar."""
    fill = look(source, MANAGER, FILL)
    bounds = {"grammar_start", "constraint_start"} <= names(fill)
    return found("contained" if bounds else "missing", MANAGER, FILL)


def masked_ends(source: Source) -> Finding:
    """0.33: tokens that would end the reasoning and that the grammar cannot start with are masked while reasoning."""
    symbol = "StructuredOutputManager._masked_reasoning_ends"
    masks = look(source, MANAGER, symbol)
    used = "_masked_reasoning_ends" in called(look(source, MANAGER, FILL))
    if masks and used and "validate_tokens" in called(masks):
        return found("contained", MANAGER, symbol)
    return found("unknown" if masks else "missing", MANAGER, symbol if masks else FILL)


def compact_separators(source: Source) -> Finding:
    """#58067's content: disable_any_whitespace hands xgrammar separators without blanks."""
    symbol = "XgrammarBackend.compile_grammar"
    given = keywords(look(source, XGRAMMAR, symbol), "compile_json_schema")
    if "any_whitespace" not in given:
        return found("unknown", XGRAMMAR, symbol, "the whitespace of JSON is not chosen here")
    return found("contained" if "separators" in given else "missing", XGRAMMAR, symbol)


def bounded_whitespace(source: Source) -> Finding:
    """#44619: the blanks between JSON tokens can be bounded."""
    symbol = "XgrammarBackend.compile_grammar"
    passed = "max_whitespace_cnt" in keywords(look(source, XGRAMMAR, symbol), "compile_json_schema")
    offered = any("whitespace_cnt" in f for f in fields(look(source, STRUCTURED_CONFIG, "StructuredOutputsConfig")))
    if passed:
        return found("contained" if offered else "partial", XGRAMMAR, symbol, "" if offered else "fixed, no setting")
    return found("missing", XGRAMMAR, symbol)
