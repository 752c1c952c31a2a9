"""What vLLM itself computes with a drafter: ``python -m specgram_lab.drafters.witness CELL.json OUT.safetensors``.

One request after another through the cell's engine (Model Runner V2, sync), each drafting step recorded: which token
was the anchor, the logits that drafts were taken from, the confidences where the engine asks for them. With the
target's tokens and hidden states this is all that a training forward needs to be held against it. The process must
have the environment that `specgram_lab.builders.options` gives; `observe` starts it so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgram_lab import capabilities
from specgram_lab.builders import options
from specgram_lab.spec import Cell, parse_cell


@dataclass
class Seen:
    """One request: ``tokens`` and ``aux`` by position; per drafting step the anchor's position, the drafts, logits
    (steps, k, drafted) and confidences (steps, k), the latter empty where the engine did not ask for them."""

    tokens: dict[int, int] = field(default_factory=dict)
    aux: dict[int, Tensor] = field(default_factory=dict)
    anchors: list[int] = field(default_factory=list)
    drafts: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    confidences: list[Tensor] = field(default_factory=list)

    def tensors(self, number: int) -> dict[str, Tensor]:
        """As stored, under the request's number."""
        known = range(len(self.aux))
        content = {
            "tokens": torch.tensor([self.tokens[i] for i in range(len(self.tokens))]),
            "aux": torch.stack([self.aux[i] for i in known]),
            "anchors": torch.tensor(self.anchors),
            "drafts": torch.stack(self.drafts),
            "logits": torch.stack(self.logits),
        }
        if self.confidences:
            content["confidences"] = torch.stack(self.confidences)
        return {f"{number}.{name}": value for name, value in content.items()}


def observe(cell: Cell, folder: Path) -> list[dict[str, Tensor]]:
    """Run ``cell`` in a process of its own and read what was seen, one dict of tensors (see `Seen`) a request.

    Raises:
        RuntimeError: the process failed; its output is in ``folder``.
    """
    from safetensors.torch import load_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cell.json").write_text(json.dumps(cell.model_dump(mode="json")), encoding="utf-8")
    out = folder / "seen.safetensors"
    environment = {**os.environ, **options.environment(cell, capabilities.device(cell), folder)}
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "specgram_lab.drafters.witness", str(folder / "cell.json"), str(out)],
            env={key: value for key, value in environment.items() if value != ""}, stdout=log, stderr=log, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"the witness ended with code {done.returncode}, see {folder / 'log'}")
    requests: dict[int, dict[str, Tensor]] = {}
    for name, value in load_file(out).items():
        number, _, part = name.partition(".")
        requests.setdefault(int(number), {})[part] = value
    return [requests[number] for number in sorted(requests)]


def watch(speculator: Any) -> list[Seen]:
    """Record every request that ``speculator`` drafts for from now on; one request at a time is in the engine."""
    seen: list[Seen] = []
    logits: list[Tensor] = []
    candidates: list[tuple[Tensor, Tensor]] = []
    propose = speculator.propose
    name = next(n for n in ("_sample_logits", "_score_candidates", "compute_draft_logits") if hasattr(speculator, n))
    sample = getattr(speculator, name)

    def sampled(*args: Any, **kwargs: Any) -> Any:
        given = sample(*args, **kwargs)
        if name == "_score_candidates":
            candidates.append((args[0][0].clone(), given[0].float().clone()))
        else:
            logits.append((args[0] if name == "_sample_logits" else given).float().clone())
        return given

    def proposed(*args: Any, **kwargs: Any) -> Any:
        logits.clear()
        candidates.clear()
        drafts = propose(*args, **kwargs)
        names = ("input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states")
        given = dict(zip((*names, "num_sampled", "num_rejected", "last_sampled"), args, strict=False)) | kwargs
        if given.get("dummy_run") or int(given["num_sampled"][0]) == 0:
            return drafts
        batch = given["input_batch"]
        valid = batch.num_tokens - int(given["num_rejected"][0])
        positions, tokens = batch.positions[:valid].tolist(), batch.input_ids[:valid].tolist()
        if positions[0] == 0:
            seen.append(Seen())
        request = seen[-1]
        states = given["aux_hidden_states"] or [given["last_hidden_states"]]
        rows = torch.cat([state[:valid] for state in states], -1)
        request.tokens.update(zip(positions, tokens, strict=True))
        request.aux.update(zip(positions, rows.clone(), strict=True))
        anchor = positions[-1] + 1
        request.tokens[anchor] = int(given["last_sampled"][int(batch.idx_mapping[0])])
        request.anchors.append(anchor)
        request.drafts.append(drafts[0].clone())
        if candidates:
            request.logits.append(walked(*candidates[0], drafts[0], speculator.vocab_size))
        else:
            request.logits.append(torch.stack([one[0] for one in logits]) if len(logits) > 1 else logits[0])
        if getattr(speculator, "use_confidence_head", False):
            request.confidences.append(speculator.draft_token_confidence_probs[0].clone())
        return drafts

    speculator.propose = proposed
    setattr(speculator, name, sampled)
    return seen


def walked(ids: Tensor, scores: Tensor, drafts: Tensor, whole: int) -> Tensor:
    """(k, whole): DFlash2's scores of its candidates along the walk it took, minus infinity elsewhere.

    Args:
        ids: (k, top), the candidates.
        scores: (k, top, top), of each candidate after each one of the place before.
        drafts: (k), what the walk took.
        whole: the size of the vocabulary.
    """
    rows = torch.full((len(ids), whole), -torch.inf)
    previous = 0
    for step, draft in enumerate(drafts.tolist()):
        rows[step, ids[step]] = scores[step, previous]
        previous = int((ids[step] == draft).nonzero()[0])
    return rows


def main(cell_file: Path, out: Path) -> None:
    """Build the engine, watch its speculator, run the cell's requests."""
    from safetensors.torch import save_file

    from specgram_lab.builders import local
    from specgram_lab.builders.session import Session

    cell = parse_cell(json.loads(cell_file.read_text(encoding="utf-8")))
    with local.quick_start():
        llm = local.build(cell)
    seen = watch(llm.llm_engine.model_executor.driver_worker.worker.model_runner.speculator)
    Session(cell, llm, progress=out.with_suffix(".progress")).run()
    stored: dict[str, Tensor] = {}
    for number, request in enumerate(seen):
        stored |= request.tensors(number)
    save_file({name: value.contiguous() for name, value in stored.items()}, out)
    sys.stdout.flush()
    os._exit(0)  # as in specgram_lab.cell


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
