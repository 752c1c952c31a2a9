"""Drafters asked again, without an engine: what they would have proposed after every prefix of a recorded output.

Two kinds of drafter are functions of the text alone. An n-gram drafter looks in it (`specgram_lab.av.lookup`); a draft
model is run over it once more, in float32 and in a process of its own (`specgram_lab.drafters.chain`). What the grammar
would have said of such a draft, its own matcher is asked again. EAGLE, MTP and block drafters read hidden states that
verification renews; what those would propose only a run tells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from specgram_lab import grammars, handover, models, workloads
from specgram_lab.av import lookup
from specgram_lab.av.recording import ASKABLE, Again, ReplayError, Run, check
from specgram_lab.paths import DataNotFoundError
from specgram_lab.spec import Cell, SpecError

CLOSE = 4.0
"""A draft whose logit is ahead of the second best by fewer steps of bf16 may be the other one in a bfloat16 engine."""


def ask(folder: Path) -> dict[str, Again]:
    """Every draft of the run in ``folder``, one entry a request.

    Raises:
        ReplayError: a run that cannot be replayed, a drafter that cannot be asked, or prompts that are others now than
            those of the run, by name or by number of tokens.
    """
    run = Run.read(folder)
    cell, method = run.cell, run.cell.drafter.method
    check([run])
    looks = method != "draft_model"
    if method not in ASKABLE:
        raise ReplayError(
            f"{method} cannot be asked again: what it proposes does not follow from the text alone;"
            " a run with budget none would tell"
        )
    if looks and cell.engine.runner != "v2":
        raise ReplayError(f"{method} is asked again as runner V2 looks, and the run was one of V1")
    if cell.engine.reasoning_parser and cell.grammar.kind != "none":
        raise ReplayError("where the grammar begins after the reasoning, it is not asked again")
    try:
        prompts = workloads.load(cell.workload)
    except (SpecError, DataNotFoundError) as fault:
        raise ReplayError(f"the run's prompts cannot be read: {fault}") from fault
    if [prompt.prompt_id for prompt in prompts] != run.prompt_ids:
        raise ReplayError(f"the prompts of {cell.workload.prompts} are others than those of the run")
    texts = [run.texts[str(number)] for number in range(len(prompts))]
    chats = [prompt.chat() for prompt in prompts]
    said = _said(cell, None if looks else _model(cell), chats, texts)
    for number, (one, tokens) in enumerate(zip(said, run.prompt_tokens, strict=True)):
        if len(one["prompt"]) != tokens:
            raise ReplayError(
                f"the prompt of request {number} has {len(one['prompt'])} tokens now, and had {tokens} in the run"
            )
    drafts = [_looked(cell, one["prompt"], text) if looks else one for one, text in zip(said, texts, strict=True)]
    schemas = [prompt.schema for prompt in prompts]
    lengths = _lengths(cell, schemas, texts, [one["drafts"] for one in drafts])
    sure = cell.target.dtype == "float32" or looks
    return {
        str(number): Again(
            drafts=np.array(one["drafts"], dtype=np.int64).reshape(-1, cell.drafter.k),
            confidences=np.array(one["odds"], dtype=np.float32).reshape(-1, cell.drafter.k),
            close=np.array([not sure and min(gaps) <= CLOSE for gaps in one["gaps"]], dtype=bool),
            valid=np.array(valid, dtype=np.int64),
            estimated=not looks,
        )
        for number, (one, valid) in enumerate(zip(drafts, lengths, strict=True))
    }


def _folder(name: str) -> Path:
    try:
        return models.ensure(name)
    except models.ModelError as fault:
        raise ReplayError(f"{name} cannot be asked again: {fault}") from fault


def _model(cell: Cell) -> Path:
    name = cell.target.model if cell.drafter.model in (None, "target") else str(cell.drafter.model)
    folder = _folder(name)
    needed = 2 * sum(path.stat().st_size for path in folder.glob("*.safetensors"))  # 16 bits are 32 there
    if needed > psutil.virtual_memory().available:
        raise ReplayError(f"{name} cannot be asked again: it takes {needed / 2**30:.0f} GiB of memory in float32")
    return folder


def _stops(target: Path) -> tuple[int, ...]:
    """Tokens that end a text: vLLM takes them from the generation config."""
    path = target / "generation_config.json"
    named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    return tuple(named) if isinstance(named, list) else () if named is None else (named,)


def _said(cell: Cell, model: Path | None, chats: Sequence[Any], texts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """The tokens of each prompt, and with a ``model`` its drafts."""
    asked = {
        "tokenizer": str(_folder(cell.target.model)),
        "model": None if model is None else str(model),
        "k": cell.drafter.k,
        "requests": [{"chat": chat, "text": text} for chat, text in zip(chats, texts, strict=True)],
    }
    try:
        found: list[dict[str, Any]] = handover.ask_module("specgram_lab.drafters.chain", asked)
    except handover.ChildError as fault:
        raise ReplayError(f"{cell.drafter.method} could not be asked again: {fault}") from fault
    return found


def _looked(cell: Cell, prompt: list[int], text: list[int]) -> dict[str, Any]:
    """The n-gram drafter's drafts, in the form of `_said`."""
    low, high = cell.drafter.effective_lookup or (0, 0)
    whole = np.asarray([*prompt, *text], dtype=np.int64)
    places = np.arange(len(prompt) + 1, len(prompt) + len(text))
    drafts = lookup.propose(whole, places.tolist(), cell.drafter.k, low, high)
    ranks = lookup.confidence(np.cumsum(whole)[places - 1], places)
    return {"drafts": drafts, "odds": np.repeat(ranks[:, None], cell.drafter.k, axis=1), "gaps": [[]] * len(places)}


def _lengths(
    cell: Cell, schemas: Sequence[Any], texts: Sequence[list[int]], drafts: Sequence[Sequence[Sequence[int]]]
) -> list[list[int]]:
    """The grammar-valid length of every draft."""
    if cell.grammar.kind == "none":
        return [[cell.drafter.k] * len(rows) for rows in drafts]
    stops = _stops(_folder(cell.target.model))
    walks = [
        grammars.Walk(
            grammars.for_prompt(cell.grammar, schema),
            tuple(text[:-1]),
            tuple(tuple(int(token) for token in draft) for draft in rows),
            stops,
        )
        for schema, text, rows in zip(schemas, texts, drafts, strict=True)
    ]
    try:
        found = grammars.walk(walks, _folder(cell.target.model))
    except grammars.MatcherError as fault:
        raise ReplayError(f"the grammar could not be asked again: {fault}") from fault
    for number, (lengths, rows) in enumerate(zip(found, drafts, strict=True)):
        if len(lengths) < len(rows):
            raise ReplayError(f"the grammar refuses the output of request {number} after {len(lengths)} tokens")
    return found
