"""Train a drafter: ``python -m specgram_lab.drafters.train NAME``; goes on where it was interrupted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specgram_lab import models
from specgram_lab.drafters import (
    batches,
    bfcl,
    data,
    dflash,
    dflash2,
    draft_model,
    dspark,
    eagle3,
    features,
    mtp,
    recipes,
    registry,
)
from specgram_lab.drafters.blocks import target_embedding
from specgram_lab.paths import cache_dir

Make = Callable[[Sequence[features.Sequence], Tensor], recipes.Trainee]
RECIPES: dict[str, tuple[recipes.Plan, Make]] = {
    module.PLAN.name: (module.PLAN, module.make) for module in (draft_model, dspark, eagle3, mtp, dflash, dflash2)
}
SAVE_EVERY_S = 60.0


def train(name: str, threads: int, out: Path | None = None, steps: int | None = None) -> dict[str, Any]:
    """Train to the recipe's last step, or to ``steps``, and write the checkpoint to ``out`` (``data/drafters``).

    The state (weights, optimiser, step, seconds) is saved once a minute in the cache folder. A recipe that has begun
    keeps the sequences it began with.

    Returns:
        The drafter's card, without measured figures.
    """
    plan, make = RECIPES[name]
    torch.set_num_threads(threads)
    torch.manual_seed(plan.seed)
    state = cache_dir() / "drafters" / "train" / name
    state.mkdir(parents=True, exist_ok=True)
    sequences = chosen(state, list(features.sequences("train", plan.with_aux)))
    aside = [s for s in sequences if is_aside(s.group, plan)]
    sequences = [s for s in sequences if not is_aside(s.group, plan)]
    trainee = make(sequences, target_embedding(models.ensure(features.TARGET)))
    optimisers = trainee.optimisers()
    recipe = json.dumps({**dataclasses.asdict(plan), "sequences": len(sequences), "aside": len(aside)})
    step, seconds = load(state, trainee, optimisers, recipe)
    last = plan.steps if steps is None else min(steps, plan.steps)
    generator = torch.Generator().manual_seed(plan.seed + step)
    stream = batches.epochs(sequences, trainee.vocabulary, plan.batch, plan.seed + step, plan.with_aux)
    begin = saved = time.monotonic()
    smooth = math.nan
    with tqdm(total=last, initial=step, unit="step", desc=name, mininterval=5.0) as bar:
        while step < last:
            for optimiser in optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = plan.learning_rate * schedule(step, plan)
            with torch.autocast("cpu", torch.bfloat16):
                loss = trainee.loss(next(stream), generator)
            trainee.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
            for optimiser in optimisers:
                optimiser.step()
            step += 1
            now_lost = loss.item()
            smooth = now_lost if math.isnan(smooth) else 0.98 * smooth + 0.02 * now_lost
            bar.update()
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
            now = time.monotonic()
            if now - saved > SAVE_EVERY_S or step == last:
                save(state, trainee, optimisers, step, seconds + now - begin, recipe)
                saved = now
    trainee.eval()
    trainee.finish(aside)
    heldout = list(features.sequences("heldout", plan.with_aux))
    where = out or registry.folder(name)
    made = {
        "name": name,
        "method": plan.method,
        "k": plan.k,
        "about": " ".join((sys.modules[type(trainee).__module__].__doc__ or "").split("\n\n")[0].split()),
        "target": features.TARGET,
        "data": {
            "source": f"the target's own answers to prompts of {bfcl.REQUIREMENT} and data/drafters/templates.json",
            "licence": f"{bfcl.LICENCE}; the templates are the lab's own, Apache-2.0; the target is Apache-2.0",
            "seed": data.SEED,
            "made_by": f"specgram drafters data --rounds {rounds(sequences)}",
            "sequences": len(sequences),
            "answer_tokens": sum(len(s) - s.prompt for s in sequences),
        },
        "recipe": {
            **dataclasses.asdict(plan),
            "threads": threads,
            "steps_done": step,
            "loss": None if math.isnan(smooth) else round(smooth, 4),
        },
        "seconds": round(seconds + time.monotonic() - begin),
        "trained_parameters": sum(p.numel() for p in trainee.parameters()),
        "offline": recipes.acceptance(trainee, heldout),
        **trainee.report(heldout),
    }
    (where / registry.CARD).unlink(missing_ok=True)  # without its card a checkpoint is not there
    trainee.export(where)
    registry.write_card(where, made)
    return made


def chosen(state: Path, sequences: list[features.Sequence]) -> list[features.Sequence]:
    """The sequences of the chunks that the recipe began with: those there are at its first start."""
    path = state / "chunks.json"
    if not path.is_file():
        path.write_text(json.dumps(sorted({s.name for s in sequences})), encoding="utf-8")
    names = set(json.loads(path.read_text(encoding="utf-8")))
    return [s for s in sequences if s.name in names]


def is_aside(group: str, plan: recipes.Plan) -> bool:
    """Whether the recipe keeps a group of prompts from its training. Whole groups: held-out prompts are of unknown
    groups as well, and on a known one a drafter is better."""
    return plan.set_aside > 0 and zlib.crc32(group.encode()) % plan.set_aside == 0


def rounds(sequences: Sequence[features.Sequence]) -> int:
    """How many rounds of `data.chunks` hold the sequences' chunks."""
    names = {s.name for s in sequences}
    return next(n for n in range(data.ROUNDS + 1) if names <= {chunk.name for chunk in data.chunks(n)})


def schedule(step: int, plan: recipes.Plan) -> float:
    """Share of the learning rate: a linear rise, then half a cosine down to a twentieth."""
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return 0.05 + 0.475 * (1 + math.cos(math.pi * done))


def save(
    state: Path,
    trainee: recipes.Trainee,
    optimisers: Sequence[torch.optim.Optimizer],
    step: int,
    seconds: float,
    recipe: str,
) -> None:
    """Write the state, whole or not at all; ``recipe`` says of what training."""
    from safetensors.torch import save_file

    tensors = {f"module.{key}": value for key, value in trainee.state_dict().items()}
    for which, optimiser in enumerate(optimisers):
        for number, entry in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{which}.{number}.{key}": value for key, value in entry.items()}
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, state / ".unfinished",
        {"step": str(step), "seconds": str(seconds), "recipe": recipe},
    )  # fmt: skip
    (state / ".unfinished").replace(state / "state.safetensors")


def load(
    state: Path, trainee: recipes.Trainee, optimisers: Sequence[torch.optim.Optimizer], recipe: str
) -> tuple[int, float]:
    """Read the state back, if there is one; (step, seconds spent).

    Raises:
        SystemExit: it is the state of another ``recipe``.
    """
    from safetensors import safe_open

    path = state / "state.safetensors"
    if not path.is_file():
        return 0, 0.0
    with safe_open(path, "pt") as file:
        about = file.metadata()
        if about.get("recipe") != recipe:
            raise SystemExit(f"{state} holds training by another recipe; delete it to begin anew")
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    trainee.load_state_dict({k.removeprefix("module."): v for k, v in stored.items() if k.startswith("module.")})
    entries: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimisers]
    for key, value in stored.items():
        if key.startswith("optimiser."):
            _, which, number, name = key.split(".")
            entries[int(which)].setdefault(int(number), {})[name] = value
    for optimiser, entry in zip(optimisers, entries, strict=True):
        optimiser.load_state_dict({**optimiser.state_dict(), "state": entry})
    return int(about["step"]), float(about["seconds"])


def main() -> None:
    """Train on the answers that are there, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    about = train(given.name, given.threads, given.out, given.steps)
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
