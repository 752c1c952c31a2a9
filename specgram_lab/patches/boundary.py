"""Fixes and faults at the end of reasoning: what a speculative window that crosses it does to the grammar.

``guard-53046`` puts the guard into 0.28.0, which lacks it. The others put back what a release of the lab has mended:
``pre-44297-*`` are the four defects of 0.24.0 (vllm#44006), each in its own place of 0.28.0; ``pre-53046-probe`` hands
a window that crosses the end to the mask unvalidated, as releases up to 0.29 do, where it is validated (vllm#48200).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgram_lab.patches.registry import Patch, Replacements
from specgram_lab.patches.rewrite import rewritten

_MANAGER = "vllm.v1.structured_output:StructuredOutputManager"
_FILL = f"{_MANAGER}.grammar_bitmask"

MOVED = "the code that it changes was moved and rewritten by vllm#48200"

ACCEPT = "                    accepted = grammar.accept_tokens(req_id, [token])\n"
GUARDED = """\
                    accepted = not post_reasoning_end_in_window or bool(grammar.validate_tokens([token]))
                    accepted = accepted and grammar.accept_tokens(req_id, [token])
"""
DETECTS = """\
                and reasoner is not None
                and not self.enable_in_reasoning
            )
"""
BLIND = DETECTS.replace("and not self.enable_in_reasoning", "and False")
BONUS = "bonus_apply = self.should_fill_bitmask(request) or apply_bitmask\n"
TOLERANT = "elif not post_reasoning_end_in_window:\n"


def _rewrite(*changes: tuple[str, str]) -> Any:
    def apply(replacements: Replacements, options: Mapping[str, Any]) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        function = rewritten(StructuredOutputManager.grammar_bitmask, *changes)
        replacements.set(StructuredOutputManager, "grammar_bitmask", function)

    return apply


def feed_the_marker(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Tokens of a step in which reasoning ended go to the grammar untrimmed, the end mark among them."""
    from vllm.v1.structured_output import StructuredOutputManager

    def trim_reasoning_for_advance(self: Any, request: Any, new_token_ids: list[int]) -> list[int]:
        return new_token_ids

    changes.set(StructuredOutputManager, "trim_reasoning_for_advance", trim_reasoning_for_advance)


def leave_crossing_drafts(changes: Replacements, options: Mapping[str, Any]) -> None:
    """A draft is validated only where reasoning was over before it."""
    from vllm.v1.structured_output import StructuredOutputManager

    def validate_tokens(self: Any, request: Any, spec_tokens: list[int]) -> list[int]:
        asked = request.structured_output_request
        if asked is not None and self._get_reasoner(request) is not None and not asked.reasoning_ended:
            return spec_tokens
        kept: list[int] = original(self, request, spec_tokens)
        return kept

    original = changes.set(StructuredOutputManager, "validate_tokens", validate_tokens)


def _of_0_28(name: str, purpose: str, *changes: tuple[str, str], elsewhere: str = MOVED) -> Patch:
    return Patch(name, purpose, (_FILL,), _rewrite(*changes), releases=("0.28.0",), elsewhere=elsewhere)


PATCHES = {
    patch.name: patch
    for patch in (
        _of_0_28(
            "guard-53046",
            "a draft behind a reasoning end is validated before the grammar is advanced (vllm#53046)",
            (ACCEPT, GUARDED),
            elsewhere="0.29.0 has the guard, and later releases validate such drafts before they are scheduled",
        ),
        _of_0_28(
            "pre-44297-window",
            "the fault of vllm#44006 (1): the rest of a window in which reasoning ends is not constrained",
            (DETECTS, BLIND),
        ),
        _of_0_28(
            "pre-44297-bonus",
            "the fault of vllm#44006 (2): the bonus row is not constrained behind drafts that the grammar struck out",
            (BONUS, "bonus_apply = apply_bitmask\n"),
        ),
        _of_0_28(
            "pre-44297-assert",
            "the fault of vllm#44006 (3): a refused draft behind a reasoning end fails an assertion",
            (TOLERANT, "else:\n"),
        ),
        Patch(
            "pre-44297-marker",
            "the fault of vllm#44006 (4): the mark that ends reasoning is fed to the grammar",
            (f"{_MANAGER}.trim_reasoning_for_advance",),
            feed_the_marker,
            releases=("0.28.0",),
            elsewhere=MOVED,
        ),
        Patch(
            "pre-53046-probe",
            "the fault of vllm#53777 put back: a window that crosses a reasoning end reaches the mask unvalidated",
            (f"{_MANAGER}.validate_tokens",),
            leave_crossing_drafts,
            releases=("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
            elsewhere="earlier releases do not validate such drafts anyway",
        ),
    )
}
