"""What a draft model says after every prefix of a text: ``python -m specgram_lab.drafters.chain``, JSON in and out.

In: ``tokenizer`` (a folder), ``model`` (a folder, or null: then only prompts are told), ``k``, and ``requests``, each
a ``chat`` and the token ids of its ``text``. Out, for each request: the token ids of its ``prompt``; after 1, 2, ...
tokens of the text the k ``drafts``, their log-odds (``odds``: what vLLM's acceptance estimator takes as its feature)
and how far ahead of the second best each was (``gaps``, in steps between neighbouring bf16 numbers of that size).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from specgram_lab.drafters.ties import spacing
from specgram_lab.handover import die_with_parent

MAX_LOG_ODDS = 40.0
"""Where vLLM cuts log-odds (acceptance_estimator.py, 0.30 to 0.33)."""


class Tree:
    """A text and the drafts that leave it: nodes are tokens, each seen after its ancestors alone."""

    def __init__(self, model: Any, text: list[int]) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.tokens = list(text)
        self.places = list(range(len(text)))
        self.children = {(at, token): at + 1 for at, token in enumerate(text[1:])}
        self.says: dict[int, tuple[int, float, float]] = {}
        self.sees = torch.ones(0, 0, dtype=torch.bool)

    def child(self, node: int) -> int:
        """The node of what the model says after ``node``; a new one must `grow` before it is asked."""
        key = (node, self.says[node][0])
        if key not in self.children:
            self.children[key] = len(self.tokens)
            self.tokens.append(key[1])
            self.places.append(self.places[node] + 1)
        return self.children[key]

    def begin(self, first: int) -> None:
        """Run the model over the text; what it says is kept from node ``first`` on."""
        size = len(self.tokens)
        self.sees = torch.ones(size, size, dtype=torch.bool).tril()
        self._run(0, first)

    def grow(self, parents: list[int]) -> None:
        """Run the model over the nodes that are new, the children of ``parents``."""
        known, size = len(self.sees), len(self.tokens)
        added = torch.cat((self.sees[parents], torch.eye(size - known, dtype=torch.bool)), dim=1)
        self.sees = torch.cat((torch.nn.functional.pad(self.sees, (0, size - known)), added))
        self._run(known, known)

    def _run(self, known: int, first: int) -> None:
        size = len(self.tokens)
        hidden = torch.zeros(size - known, size).masked_fill(~self.sees[known:], torch.finfo(torch.float32).min)
        logits = self.model(
            torch.tensor([self.tokens[known:]]),
            position_ids=torch.tensor([self.places[known:]]),
            attention_mask=hidden[None, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=size - first,
        ).logits[0]
        self.says |= {node: said(row) for node, row in zip(range(first, size), logits, strict=True)}


def said(logits: Tensor) -> tuple[int, float, float]:
    """The best token, its log-odds, and how far it is ahead of the second best, in steps of bf16."""
    (first, second), (token, _) = (part.tolist() for part in logits.topk(2))
    others = logits.clone()
    others[token] = -torch.inf
    odds = first - float(others.logsumexp(0))
    return token, max(-MAX_LOG_ODDS, min(odds, MAX_LOG_ODDS)), (first - second) / spacing(abs(first))


def drafts(model: Any, prompt: list[int], text: list[int], k: int) -> dict[str, list[list[Any]]]:
    """``drafts``, ``odds`` and ``gaps`` after each prefix of ``text`` from its first token to its last but one."""
    if len(text) < 2:
        return {"drafts": [], "odds": [], "gaps": []}
    tree = Tree(model, prompt + text[:-1])
    tree.begin(len(prompt))
    ends = list(range(len(prompt), len(prompt) + len(text) - 1))
    found: list[list[tuple[int, float, float]]] = [[] for _ in ends]
    for depth in range(k):
        for row, node in zip(found, ends, strict=True):
            row.append(tree.says[node])
        if depth + 1 < k:
            known, before = len(tree.tokens), ends
            ends = [tree.child(node) for node in before]
            parents = {node: parent for node, parent in zip(ends, before, strict=True) if node >= known}
            if parents:
                tree.grow([parents[node] for node in sorted(parents)])
    return {name: [[one[at] for one in row] for row in found] for at, name in enumerate(("drafts", "odds", "gaps"))}


def whole_attention(config: Any) -> bool:
    """Whether every layer sees the whole text: a recurrent state cannot branch, and a window cuts the tree."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return kinds == {"full_attention"} and not window


def main() -> None:
    """Answer what stands on standard input."""
    die_with_parent()
    job = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(Path(job["tokenizer"]), local_files_only=True)
    model = None
    if job["model"] is not None:
        folder = Path(job["model"])
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", use_safetensors=True, local_files_only=True
        )
        if not whole_attention(model.config):
            sys.exit(f"{folder.name} has layers that do not see the whole text")
    answers = []
    for asked in job["requests"]:
        prompt = tokenizer.apply_chat_template(asked["chat"], add_generation_prompt=True, return_dict=False)
        answer: dict[str, Any] = {"prompt": prompt}
        if model is not None:
            with torch.inference_mode():
                answer |= drafts(model, prompt, asked["text"], job["k"])
        answers.append(answer)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
