"""Answers and the target's hidden states from one pass: ``python -m specgram_lab.drafters.answers ROUNDS [LIMIT]``.

The engine that answers (V1, no drafter) computes all that training needs: the states of every token, and under the
request's grammar the likeliest tokens at each place. Both are taken where the engine has them, so that nothing is
computed twice and a label is what this engine's greedy decoding takes. One file a chunk, written last; what is there
is not made again. The process must have the environment that `specgram_lab.builders.options` gives.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specgram_lab.drafters import data, features
from specgram_lab.handover import die_with_parent


class Taps:
    """What an engine's runner computes, by request and position, since the last `clear`."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.states: list[Tensor] = []
        self.tops: list[tuple[Tensor, Tensor]] = []
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []
        self.last: list[tuple[np.ndarray, np.ndarray]] = []
        self.streams: dict[int, Tensor] = {}
        layers = runner.model.model.layers
        for layer in features.AUX_LAYERS:
            layers[layer].register_forward_hook(self._keep(layer))
        layers[-1].register_forward_hook(self._step, with_kwargs=True)  # vLLM calls the model past any hook of its own
        runner.sampler.register_forward_pre_hook(self._sampled, with_kwargs=True)

    def clear(self) -> None:
        """Forget what was seen."""
        for seen in (self.states, self.tops, self.rows, self.last):
            seen.clear()

    def _keep(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            hidden, residual = output
            self.streams[layer] = hidden + residual

        return hook

    def _step(self, _module: Any, inputs: tuple[Any, ...], keywords: dict[str, Any], _output: Any) -> None:
        batch = self.runner.input_batch
        ends = self.runner.query_start_loc.np[: batch.num_reqs + 1].copy()
        requests = np.array([number_of(name) for name in batch.req_ids[: batch.num_reqs]])
        given = keywords.get("positions")
        positions = (inputs[0] if given is None else given)[: ends[-1]].numpy().copy()
        self.rows.append((np.repeat(requests, np.diff(ends)), positions))
        self.last.append((requests, positions[ends[1:] - 1]))
        self.states.append(torch.cat([self.streams[layer][: ends[-1]] for layer in features.AUX_LAYERS], -1))

    def _sampled(self, _module: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        logits = (keywords["logits"] if "logits" in keywords else inputs[0]).float()
        values, ids = logits.topk(features.TOP, -1)
        # of equal logits greedy decoding takes the first, topk any
        best = logits.argmax(-1, keepdim=True)
        ids.scatter_(1, (ids == best).int().argmax(-1, keepdim=True), ids[:, :1].clone())[:, :1] = best
        logprobs = values - logits.logsumexp(-1, keepdim=True)
        self.tops.append((ids.int(), logprobs.clamp(min=features.FLOOR).half()))

    def collected(self, sent: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        """All requests as `features` stores them.

        Args:
            sent: prompt and answer of each, in the order of their numbers.

        Raises:
            RuntimeError: a place was not seen.
        """
        lengths = [len(prompt) + len(answer) for prompt, answer in sent]
        begins = np.cumsum([0, *lengths])
        aux = torch.zeros(int(begins[-1]), self.states[0].shape[-1], dtype=torch.bfloat16)
        seen = torch.zeros(len(aux), dtype=torch.bool)
        for (requests, positions), states in zip(self.rows, self.states, strict=True):
            inside = positions < np.array(lengths)[requests]
            places = torch.from_numpy((begins[requests] + positions)[inside])
            aux[places] = states[torch.from_numpy(inside)]
            seen[places] = True
        seen[torch.from_numpy(begins[1:] - 1)] = True  # nothing was computed with the last token
        prompts = np.array([len(prompt) for prompt, _ in sent])
        rows = np.cumsum([0, *(len(answer) + 1 for _, answer in sent)])
        ids = torch.zeros(int(rows[-1]), features.TOP, dtype=torch.int32)
        logprobs = torch.full((len(ids), features.TOP), features.FLOOR, dtype=torch.float16)
        known = torch.zeros(len(ids), dtype=torch.bool)
        for (requests, positions), (top_ids, top_logprobs) in zip(self.last, self.tops, strict=True):
            offsets = positions + 1 - prompts[requests]  # a part of a prompt samples, and nobody takes it
            inside = (offsets >= 0) & (offsets < np.diff(rows)[requests])
            places = torch.from_numpy((rows[requests] + offsets)[inside])
            ids[places], logprobs[places] = top_ids[torch.from_numpy(inside)], top_logprobs[torch.from_numpy(inside)]
            known[places] = True
        known[torch.from_numpy(rows[1:] - 1)] = False
        missing = int((~seen).sum()) + int((~known).sum()) - len(sent)
        if missing:
            raise RuntimeError(f"{missing} places of {len(sent)} requests were not seen")
        return {
            "tokens": torch.tensor([token for prompt, answer in sent for token in (*prompt, *answer)]).int(),
            "prompts": torch.from_numpy(prompts).int(), "lengths": torch.tensor(lengths).int(), "aux": aux,
            "top_ids": ids, "top_logprobs": logprobs, "known": known,
        }  # fmt: skip


def number_of(name: str) -> int:
    """The number of a request under the engine's own name for it."""
    return int(name.partition("-")[0])


def main(rounds: int, limit: int | None = None) -> None:
    """Answer what is missing of the first ``rounds`` rounds, with one engine; ``limit`` as in `data.generate`."""
    from safetensors.torch import save_file

    from specgram_lab.builders import local
    from specgram_lab.builders.session import Session

    die_with_parent()
    prompts = data.folder() / "prompts"
    left = [chunk.first(limit) for chunk in data.chunks(rounds) if not features.file(chunk).is_file()]
    if not left:
        return
    cells = [chunk.cell(prompts) for chunk in left]
    with local.quick_start():
        llm = local.build(cells[0])
    taps = Taps(llm.llm_engine.model_executor.driver_worker.worker.model_runner)
    for chunk, cell in zip(left, cells, strict=True):
        taps.clear()
        begun = time.perf_counter()
        session = Session(cell, llm, progress=data.folder() / "progress")
        session.run()
        sent = [(list(s.prompt), list(s.output.outputs[0].token_ids)) for s in session.requests]
        unfinished = features.folder() / f".{chunk.name}-{os.getpid()}"
        save_file(taps.collected(sent), unfinished)
        unfinished.rename(features.file(chunk))
        speed = session.output_tokens / (time.perf_counter() - begun)
        print(f"{chunk.name}: {session.output_tokens} tokens, {speed:.0f} a second", flush=True)
    sys.stdout.flush()
    os._exit(0)  # as in specgram_lab.cell


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
