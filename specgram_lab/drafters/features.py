"""What a drafter is trained on: answers with the target's hidden states and likeliest next tokens, as safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specgram_lab.drafters import data
from specgram_lab.paths import cache_dir

TARGET = "smollm2-135m"
AUX_LAYERS = (8, 18, 29)
"""Outputs of these decoder layers (from 0), before the next layer's norm. vLLM counts them one higher."""
TOP = 16
"""Likeliest next tokens kept per position, with their log probabilities."""
FLOOR = -50.0
"""Log probability that stands for none: a grammar may allow fewer than `TOP` tokens."""


@dataclass
class Sequence:
    """One prompt of the chunk ``name`` with its answer: ``tokens`` and ``aux`` have one row a token.

    ``top_ids`` and ``top_logprobs`` have one row a token of the answer and one for what would follow: row i is about
    the token at ``prompt + i``, under the answer's grammar. ``known`` is false for rows behind the grammar's end.
    """

    name: str
    group: str
    kind: data.Kind
    tokens: Tensor
    prompt: int
    aux: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    known: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def greedy(self) -> bool:
        """Whether the answer is the one of temperature 0."""
        rows = len(self) - self.prompt
        same = self.tokens[self.prompt :] == self.top_ids[:rows, 0]
        return bool((same | ~self.known[:rows]).all())


def tapped(aux: Tensor, layers: tuple[int, ...]) -> Tensor:
    """The states of ``layers`` alone, in that order, out of those of `AUX_LAYERS` side by side."""
    width = aux.shape[-1] // len(AUX_LAYERS)
    places = [AUX_LAYERS.index(layer) for layer in layers]
    return torch.cat([aux[..., i * width : (i + 1) * width] for i in places], -1)


def folder() -> Path:
    """Where they are kept."""
    return cache_dir() / "drafters" / "states"


def file(chunk: data.Chunk) -> Path:
    """Where a chunk's answers and states lie once they are there."""
    return folder() / f"{chunk.name}.safetensors"


def sequences(split: data.Split, with_aux: bool = True) -> Iterator[Sequence]:
    """Every sequence of a split whose chunk has features; without hidden states if nobody reads them."""
    from safetensors import safe_open

    for chunk in data.chunks():
        path = file(chunk)
        if chunk.split != split or not path.is_file():
            continue
        with safe_open(path, "pt") as opened:  # mapped, not read
            stored = {key: opened.get_tensor(key) for key in opened.keys() if with_aux or key != "aux"}  # noqa: SIM118
        begin, top = 0, 0
        sizes = list(zip(stored["prompts"].tolist(), stored["lengths"].tolist(), strict=True))
        asked = chunk.prompts[: len(sizes)]  # a trial asks the first ones alone
        for written, (prompt, length) in zip(asked, sizes, strict=True):
            end, top_end = begin + length, top + length - prompt + 1
            yield Sequence(
                chunk.name, written.group, chunk.kind, stored["tokens"][begin:end].long(), prompt,
                stored["aux"][begin:end] if with_aux else torch.empty(length, 0),
                stored["top_ids"][top:top_end].long(), stored["top_logprobs"][top:top_end].float(),
                stored["known"][top:top_end],
            )  # fmt: skip
            begin, top = end, top_end
