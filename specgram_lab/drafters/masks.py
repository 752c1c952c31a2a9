"""What a grammar allowed at each token of an answer: xgrammar, set up as vLLM's backend does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgram_lab.drafters import data
from specgram_lab.grammars.jobs import for_prompt, job
from specgram_lab.spec import Grammar


class Masks:
    """Compiles the grammars of a tokenizer's answers, each once."""

    def __init__(self, target: Path) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        self.xgrammar = xgrammar
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        tokenizer = AutoTokenizer.from_pretrained(target)
        self.whole = config["vocab_size"]
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self.whole)
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self.bitmask = xgrammar.allocate_token_bitmask(1, self.whole)

    def compiled(self, prompt: data.Written, kind: data.Kind) -> Any:
        """The grammar of a request."""
        grammar = for_prompt(Grammar(**data.grammar(kind)), prompt.schema)
        made = job(grammar)
        return self.compiler.compile_json_schema(made["text"], any_whitespace=made["any_whitespace"])

    def apply(self, prompt: data.Written, kind: data.Kind, answer: Sequence[int], logits: Tensor) -> Tensor:
        """Set what was not allowed to minus infinity; returns which rows a grammar still spoke about.

        Args:
            prompt: the request.
            kind: of its grammar; with ``free`` nothing is changed.
            answer: the tokens that were sampled.
            logits: (len(answer) + 1, vocabulary), float32; row i is about token i.

        Raises:
            ValueError: the grammar refuses a token of the answer.
        """
        known = torch.ones(len(logits), dtype=torch.bool)
        if kind == "free":
            return known
        matcher = self.xgrammar.GrammarMatcher(self.compiled(prompt, kind))
        for row in range(len(logits)):
            if matcher.is_terminated():
                known[row:] = False
                break
            matcher.fill_next_token_bitmask(self.bitmask)
            self.xgrammar.apply_token_bitmask_inplace(logits[row : row + 1], self.bitmask)
            if row < len(answer) and not matcher.accept_token(answer[row]):
                raise ValueError(f"the grammar of {prompt.prompt_id} refuses token {answer[row]} at {row}")
        return known
