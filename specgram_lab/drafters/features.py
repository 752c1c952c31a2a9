"""The target's hidden states and likeliest next tokens for every answered chunk, computed once, kept as safetensors.

``python -m specgram_lab.drafters.features`` computes what is missing, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specgram_lab import ledger, models
from specgram_lab.drafters import data
from specgram_lab.drafters.masks import Masks
from specgram_lab.paths import cache_dir
from specgram_lab.run import DONE

TARGET = "smollm2-135m"
AUX_LAYERS = (8, 18, 29)
"""Outputs of these decoder layers (from 0), before the next layer's norm. vLLM counts them one higher."""
TOP = 16
"""Likeliest next tokens kept per position, with their log probabilities."""
FLOOR = -50.0
"""Log probability that stands for none: a grammar may allow fewer than `TOP` tokens."""
BATCH = 32


@dataclass
class Sequence:
    """One prompt with its answer: ``tokens`` and ``aux`` have one row a token.

    ``top_ids`` and ``top_logprobs`` have one row a token of the answer and one for what would follow: row i is about
    the token at ``prompt + i``, under the answer's grammar. ``known`` is false for rows behind the grammar's end.
    """

    name: str
    kind: data.Kind
    tokens: Tensor
    prompt: int
    aux: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    known: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


def tapped(aux: Tensor, layers: tuple[int, ...]) -> Tensor:
    """The states of ``layers`` alone, in that order, out of those of `AUX_LAYERS` side by side."""
    width = aux.shape[-1] // len(AUX_LAYERS)
    places = [AUX_LAYERS.index(layer) for layer in layers]
    return torch.cat([aux[..., i * width : (i + 1) * width] for i in places], -1)


def folder() -> Path:
    """Where they are kept."""
    return cache_dir() / "drafters" / "states"


def extract(limit: int | None = None) -> int:
    """Compute what is missing for chunks that are answered; at most ``limit`` chunks. Returns how many were done."""
    folder().mkdir(parents=True, exist_ok=True)
    ready = [c for c in data.chunks() if (data.folder() / "cells" / c.name / DONE).is_file()]
    missing = [c for c in ready if not (folder() / f"{c.name}.safetensors").is_file()][:limit]
    if missing:
        model = load_target()
        taps = Taps(model)
        masks = Masks(models.ensure(TARGET))
        for chunk in tqdm(missing, unit="chunk", desc="states", mininterval=5.0):
            _extract(chunk, model, taps, masks)
    return len(missing)


def load_target() -> Any:
    """The target in bfloat16, for a forward pass only."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(models.ensure(TARGET), dtype=torch.bfloat16).eval()


class Taps:
    """Keeps what the layers of `AUX_LAYERS` gave in the last forward pass, before any norm."""

    def __init__(self, model: Any) -> None:
        self.seen: dict[int, Tensor] = {}
        for layer in AUX_LAYERS:
            model.model.layers[layer].register_forward_hook(self._keep(layer))

    def _keep(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self.seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def joined(self) -> Tensor:
        """Side by side, in the order of `AUX_LAYERS`."""
        return torch.cat([self.seen[layer] for layer in AUX_LAYERS], -1)


def answered(chunk: data.Chunk) -> list[tuple[list[int], list[int]]]:
    """Prompt, through the target's chat template, and answer of each of a chunk's requests, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.ensure(TARGET))
    answers = ledger.read_table(data.folder() / "cells" / chunk.name, "requests").set_index("prompt_id")["token_ids"]
    found = []
    for prompt in chunk.prompts:
        turns = prompt.line(chunk.kind)["messages"]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        found.append((list(ids), [int(token) for token in answers[prompt.prompt_id]]))
    return found


@torch.inference_mode()
def _extract(chunk: data.Chunk, model: Any, taps: Taps, masks: Masks) -> None:
    from safetensors.torch import save_file

    answers = answered(chunk)
    whole = [torch.tensor(prompt + answer, dtype=torch.int32) for prompt, answer in answers]
    order = sorted(range(len(answers)), key=lambda i: len(whole[i]))
    rows: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    for begin in range(0, len(order), BATCH):
        part = order[begin : begin + BATCH]
        ids = [whole[i] for i in part]
        # Padding on the right: causal attention keeps it from what stands before.
        hidden = model.model(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)).last_hidden_state
        aux = taps.joined()
        for row, i in enumerate(part):
            length = len(ids[row])
            logits = model.lm_head(hidden[row, len(answers[i][0]) - 1 : length]).float()
            known = masks.apply(chunk.prompts[i], chunk.kind, answers[i][1], logits)
            top = logits.topk(TOP, -1)
            logprobs = top.values - logits.logsumexp(-1, keepdim=True)
            rows[i] = (aux[row, :length].clone(), top.indices.int(), logprobs.clamp(min=FLOOR).half(), known)
    stored = {
        "tokens": torch.cat(whole),
        "prompts": torch.tensor([len(prompt) for prompt, _ in answers], dtype=torch.int32),
        "lengths": torch.tensor([len(ids) for ids in whole], dtype=torch.int32),
    }
    for column, key in enumerate(("aux", "top_ids", "top_logprobs", "known")):
        stored[key] = torch.cat([rows[i][column] for i in range(len(answers))])
    unfinished = folder() / f".{chunk.name}"
    save_file(stored, unfinished)
    unfinished.rename(folder() / f"{chunk.name}.safetensors")


def sequences(split: data.Split, with_aux: bool = True) -> Iterator[Sequence]:
    """Every sequence of a split whose chunk has features; without hidden states if nobody reads them."""
    from safetensors import safe_open

    for chunk in data.chunks():
        path = folder() / f"{chunk.name}.safetensors"
        if chunk.split != split or not path.is_file():
            continue
        with safe_open(path, "pt") as file:  # mapped, not read
            stored = {key: file.get_tensor(key) for key in file.keys() if with_aux or key != "aux"}  # noqa: SIM118
        begin, top = 0, 0
        for prompt, length in zip(stored["prompts"].tolist(), stored["lengths"].tolist(), strict=True):
            end, top_end = begin + length, top + length - prompt + 1
            yield Sequence(
                chunk.name, chunk.kind, stored["tokens"][begin:end].long(), prompt,
                stored["aux"][begin:end] if with_aux else torch.empty(length, 0),
                stored["top_ids"][top:top_end].long(), stored["top_logprobs"][top:top_end].float(),
                stored["known"][top:top_end],
            )  # fmt: skip
            begin, top = end, top_end


if __name__ == "__main__":
    extract()
