"""Sequences as padded batches with the labels that a draft is held against, over a vocabulary of the drafter's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specgram_lab.drafters import features

HARD = 0.5
"""Weight of the one token that greedy decoding takes; the rest goes to the target's distribution."""
FREQUENT = 8192
"""Tokens that a step's loss meets all, where a head knows them all; a part of the others is drawn."""


@dataclass
class Batch:
    """``labels`` (batch, tokens): the token that the target puts there at temperature 0, -1 outside the answer.

    ``label_ids`` and ``label_weights`` (batch, tokens, candidates) are the training labels at the same places, in
    draft ids; weights are 0 where a token has no draft id, and 0 throughout outside the answer.
    """

    tokens: Tensor
    prompts: Tensor
    lengths: Tensor
    labels: Tensor
    label_ids: Tensor
    label_weights: Tensor
    aux: Tensor | None

    @property
    def positions(self) -> Tensor:
        """0, 1, 2, ... in every row."""
        return torch.arange(self.tokens.shape[1]).expand(self.tokens.shape)


@dataclass(frozen=True)
class Vocabulary:
    """Which tokens training is about: ``kept`` in ascending order; ``to_draft`` is -1 for all others."""

    kept: Tensor
    to_draft: Tensor

    @classmethod
    def frequent(cls, sequences: Sequence[features.Sequence], whole: int, most: int = FREQUENT) -> Vocabulary:
        """The tokens that greedy decoding takes most often in the sequences' answers, at most ``most``."""
        counts = torch.zeros(whole, dtype=torch.long)
        for sequence in sequences:
            greedy = sequence.top_ids[:-1, 0][sequence.known[:-1]]
            counts += torch.bincount(greedy, minlength=whole)
        taken = counts.topk(min(most, int((counts > 0).sum()))).indices
        return cls.of(taken.sort().values, whole)

    @classmethod
    def of(cls, kept: Tensor, whole: int) -> Vocabulary:
        """The vocabulary that holds exactly ``kept``."""
        to_draft = torch.full((whole,), -1, dtype=torch.long)
        to_draft[kept] = torch.arange(len(kept))
        return cls(kept, to_draft)


def labels(sequence: features.Sequence, vocabulary: Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
    """(greedy token, candidate draft ids, their weights) for each token of the answer."""
    rows = len(sequence) - sequence.prompt
    ids = sequence.top_ids[:rows]
    shares = sequence.top_logprobs[:rows].softmax(-1) * (1 - HARD)
    candidates = torch.cat((ids[:, :1], ids), 1)
    weights = torch.cat((torch.full((rows, 1), HARD), shares), 1)
    mapped = vocabulary.to_draft[candidates]
    known = sequence.known[:rows]
    return ids[:, 0].where(known, -1), mapped.clamp(min=0), weights * (mapped >= 0) * known[:, None]


def collate(sequences: Sequence[features.Sequence], vocabulary: Vocabulary, with_aux: bool) -> Batch:
    """One batch, padded on the right."""
    greedy, ids, weights = [], [], []
    for sequence in sequences:
        g, i, w = labels(sequence, vocabulary)
        before = sequence.prompt
        greedy.append(torch.cat((torch.full((before,), -1), g)))
        ids.append(torch.cat((torch.zeros(before, i.shape[1], dtype=torch.long), i)))
        weights.append(torch.cat((torch.zeros(before, w.shape[1]), w)))
    return Batch(
        tokens=pad_sequence([s.tokens for s in sequences], batch_first=True),
        prompts=torch.tensor([s.prompt for s in sequences]),
        lengths=torch.tensor([len(s) for s in sequences]),
        labels=pad_sequence(greedy, batch_first=True, padding_value=-1),
        label_ids=pad_sequence(ids, batch_first=True),
        label_weights=pad_sequence(weights, batch_first=True),
        aux=pad_sequence([s.aux for s in sequences], batch_first=True) if with_aux else None,
    )


def epochs(
    sequences: Sequence[features.Sequence], vocabulary: Vocabulary, size: int, seed: int, with_aux: bool
) -> Iterator[Batch]:
    """Batches without end; sequences of like length together, both their order and the batches' drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        noise = torch.rand(len(sequences), generator=generator) * 24
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]) + float(noise[i]))
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        for group in torch.randperm(len(groups), generator=generator).tolist():
            yield collate([sequences[i] for i in groups[group]], vocabulary, with_aux)
