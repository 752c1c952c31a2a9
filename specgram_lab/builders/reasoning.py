"""Reasoning parsers for a target without tokens that mean thinking, loaded by vLLM as its ``reasoning_parser_plugin``.

What vLLM does with a parser's answers is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

from specgram_lab.builders.options import FENCE, MARKS


class MarksReasoningParser(BaseThinkingReasoningParser):
    """For scenarios: reasoning begins with the output and ends with ``<issue_closed>``, a mark of SmolLM2's vocabulary
    that no prompt contains."""

    @property
    def start_token(self) -> str:
        """The token that begins reasoning."""
        return "<issue_start>"

    @property
    def end_token(self) -> str:
        """The token that ends it."""
        return "<issue_closed>"


class FenceReasoningParser(BaseThinkingReasoningParser):
    """For the real target, which opens its answers with a fence: the grammar begins on the answer's second line.

    A turn of a chat begins with a line of its own, which holds the role.
    """

    @property
    def start_token(self) -> str:
        """The token that begins a turn."""
        return "<|im_start|>"

    @property
    def end_token(self) -> str:
        """The end of a line, as the vocabulary writes it."""
        return "\u010a"

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last turn has come to the second line behind that."""
        ids = list(input_ids)
        turn = ids[::-1].index(self.start_token_id) if self.start_token_id in ids else len(ids)
        return ids[len(ids) - turn :].count(self.end_token_id) > 1


ReasoningParserManager.register_module(MARKS, module=MarksReasoningParser)
ReasoningParserManager.register_module(FENCE, module=FenceReasoningParser)
