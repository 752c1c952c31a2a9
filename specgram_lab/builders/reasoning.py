"""A reasoning parser for scenarios, loaded by vLLM as its ``reasoning_parser_plugin``.

The small targets have no tokens that mean thinking. Two marks of SmolLM2's vocabulary that no prompt contains stand in
for them; what vLLM does with a parser's answers is vLLM's own.
"""

from __future__ import annotations

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

from specgram_lab.builders.options import REASONING_PARSER


class MarksReasoningParser(BaseThinkingReasoningParser):
    """Reasoning begins with the output and ends with ``<issue_closed>``."""

    @property
    def start_token(self) -> str:
        """The token that begins reasoning."""
        return "<issue_start>"

    @property
    def end_token(self) -> str:
        """The token that ends it."""
        return "<issue_closed>"


ReasoningParserManager.register_module(REASONING_PARSER, module=MarksReasoningParser)
