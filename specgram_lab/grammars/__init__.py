"""Grammars: how a request carries one, whether an engine can compile it, and what became of an output under it.

Importing this needs neither vllm nor xgrammar; what asks them (`preflight`, `replay`, `validate_texts`) does so in a
process of its own.
"""

from __future__ import annotations

from specgram_lab.grammars.child import ChildLimits, CompilerSession
from specgram_lab.grammars.inspection import Preflight, preflight, preflight_many
from specgram_lab.grammars.jobs import for_prompt
from specgram_lab.grammars.matching import (
    DraftMatch,
    MatcherError,
    Question,
    Replay,
    Walk,
    replay,
    validate_texts,
    walk,
)
from specgram_lab.grammars.outputs import (
    BLANK_RUN,
    NUMBER_RUN,
    OutputClass,
    OutputVerdict,
    TextMatch,
    classify,
    classify_many,
    escape_surrogates,
)
from specgram_lab.grammars.vllm_args import TOOL_STYLES, to_vllm, tools_grammar
from specgram_lab.grammars.whitespace import Whitespace, whitespace_mode

__all__ = [
    "BLANK_RUN",
    "NUMBER_RUN",
    "TOOL_STYLES",
    "ChildLimits",
    "CompilerSession",
    "DraftMatch",
    "MatcherError",
    "OutputClass",
    "OutputVerdict",
    "Preflight",
    "Question",
    "Replay",
    "TextMatch",
    "Walk",
    "Whitespace",
    "classify",
    "classify_many",
    "escape_surrogates",
    "for_prompt",
    "preflight",
    "preflight_many",
    "replay",
    "to_vllm",
    "tools_grammar",
    "validate_texts",
    "walk",
    "whitespace_mode",
]
