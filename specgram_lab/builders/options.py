"""A cell's spec as vLLM takes it: patches, environment and arguments. Plain data; vLLM itself is not imported.

vLLM reads runner, interpreter and patches from the environment, so `environment` is for the process to be started.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specgram_lab import builds, models
from specgram_lab.av.costs import linear
from specgram_lab.builders import marks
from specgram_lab.scenarios import load_scenario
from specgram_lab.spec import Cell

PATCHES = "SPECGRAM_PATCHES"
"""Environment variable: names of patches, separated by commas."""
OPTIONS = "SPECGRAM_PATCH_OPTIONS"
"""Environment variable: JSON object, options by patch."""
MARKS, FENCE = "specgram_marks", "specgram_fence"
"""Names of the reasoning parsers in `specgram_lab.builders.reasoning`."""
FENCE_END = "\n"
"""What ends that which `FENCE` calls reasoning."""
REPORTS = "SPECGRAM_REPORTS"
"""Environment variable: folder that each process of an engine writes its report to."""


def patches_for(cell: Cell, device: str) -> dict[str, dict[str, Any]]:
    """Every patch that ``cell`` needs on ``device``, by name, with its options."""
    engine = cell.engine
    wanted: dict[str, dict[str, Any]] = {name: {} for name in engine.patches}
    if device == "cpu":
        if engine.scheduling == "async":
            wanted["async-on-cpu"] = {}
        if engine.runner == "v2":
            wanted.setdefault("v2-on-cpu" if engine.kind == "local" else "v2-without-worker", {})
        if engine.budget.policy != "off":
            wanted["av-on-cpu"] = {}
    if engine.budget.policy != "off":
        curve = engine.budget.costs or (linear(*engine.budget.verify_cost) if device == "cpu" else None)
        wanted["av-budget"] = {
            "policy": engine.budget.policy,
            "value": engine.budget.value,
            "costs": curve.model_dump(mode="json") if curve is not None else None,
        }
    runner = "scripted" if engine.kind == "scripted" else engine.runner
    if engine.kind == "local" and cell.workload.scenario is not None:
        wanted["scripted-drafter"] = {}
    if "rfc-counters" in wanted:
        wanted["rfc-counters"] = {"runner": runner}
    if engine.record:
        wanted["recorder"] = {"runner": runner}
    return dict(sorted(wanted.items()))


def engine_key(cell: Cell) -> str:
    """Cells with the same key can share one engine.

    They differ in grammar, prompts and sampling parameters only, and in AV's budget where the engine is one process,
    in which the patch ``av-budget`` takes it anew.
    """
    content = cell.model_dump(mode="json", exclude={"workload", "grammar", "limits"})
    if cell.engine.tensor_parallel * cell.engine.pipeline_parallel == 1:
        content["engine"]["budget"] = cell.engine.budget.policy != "off"
    scenario = cell.workload.scenario and load_scenario(cell.workload.scenario)
    content["engine_level"] = [
        cell.workload.concurrency,
        cell.grammar.backend,
        cell.grammar.disable_any_whitespace,
        scenario.setting.model_dump(mode="json") if scenario else None,
    ]
    return json.dumps(content, sort_keys=True)


def environment(cell: Cell, device: str, reports: Path) -> dict[str, str]:
    """Environment variables for the process that runs ``cell``'s engine; values it must not have are empty."""
    patches = patches_for(cell, device)
    wanted = {
        "HF_HUB_OFFLINE": "1" if models.is_ready(cell.target.model) else os.environ.get("HF_HUB_OFFLINE", "0"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if cell.engine.runner == "v2" else "0",
        "VLLM_PLUGINS": "specgram",
        "VLLM_NO_USAGE_STATS": "1",
        "PROMETHEUS_MULTIPROC_DIR": "",
        PATCHES: ",".join(patches),
        OPTIONS: json.dumps(patches),
        REPORTS: str(reports),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUTF8": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # vLLM and torch are thousands of files; compiling them anew costs half a minute
    }
    if cell.engine.build is not None and builds.find(cell.engine.build).state != "own":
        # vLLM keeps what it found out about a model class in one file for all releases: taking turns, each asks anew
        wanted["VLLM_CACHE_ROOT"] = str(builds.folder(cell.engine.build) / "cache")
    if device == "cpu":
        if cell.engine.runner == "v2" and cell.engine.kind == "local":
            wanted |= interpreter(os.environ)
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
        openmp = Path(sysconfig.get_path("data")) / "lib" / "libiomp5.so"
        if openmp.is_file() and "LD_PRELOAD" not in os.environ:
            wanted["LD_PRELOAD"] = str(openmp)  # vLLM: speculative decoding on a CPU without it is much slower
    return wanted


def interpreter(inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that put Triton's interpreter in, as the backend ``cpu``, for a process to be started.

    Triton finds the backend through an entry point, in a folder that only such a process has on its path: vLLM
    takes the presence of the backend for a working Triton, and would start V2 wherever the lab is installed.
    """
    folder = str(Path(__file__).parent / "cpu" / "on_path")
    path = os.pathsep.join(part for part in (folder, inherited.get("PYTHONPATH", "")) if part)
    return {"TRITON_INTERPRET": "1", "PYTHONPATH": path}


def draft_model(cell: Cell) -> str | None:
    """The folder or name of the drafter's weights."""
    name = cell.drafter.model
    if name is None:
        return None
    return str(models.model_dir(cell.target.model if name == "target" else name))


def speculative_config(cell: Cell) -> dict[str, Any] | None:
    """vLLM's ``speculative_config``, or None without a drafter."""
    drafter = cell.drafter
    if drafter.method == "none":
        return None
    # vLLM knows DFlash2 by its checkpoint's architecture
    config: dict[str, Any] = {
        "method": "dflash" if drafter.method == "dflash2" else drafter.method,
        "num_speculative_tokens": drafter.k,
    }
    if drafter.method == "scripted":  # only the vocabulary of its draft model is looked at
        config |= {"method": "draft_model", "model": str(models.model_dir(cell.target.model))}
    if drafter.model is not None:
        config["model"] = draft_model(cell)
    for key in ("prompt_lookup_min", "prompt_lookup_max"):
        value = getattr(drafter, key)
        if value is not None:
            config[key] = value
    if drafter.rejection == "synthetic":
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(drafter.synthetic_rates)}
    if cell.engine.budget.policy != "off":
        config["enable_adaptive_verification"] = True
    if drafter.local_argmax:
        config["use_local_argmax_reduction"] = True
    return config


def reasoning(parser: str) -> dict[str, str]:
    """The reasoning parser of that name as structured_outputs_config has it: one of vLLM's, or `MARKS` or `FENCE`."""
    if parser not in (MARKS, FENCE):
        return {"reasoning_parser": parser}
    return {"reasoning_parser": parser, "reasoning_parser_plugin": str(Path(__file__).with_name("reasoning.py"))}


def engine_arguments(cell: Cell) -> dict[str, Any]:
    """Keyword arguments of vLLM's `LLM` for ``cell``."""
    engine, workload = cell.engine, cell.workload
    arguments: dict[str, Any] = {
        "model": str(models.model_dir(cell.target.model)),
        "dtype": cell.target.dtype,
        "max_model_len": cell.target.max_model_len,
        "max_num_seqs": workload.concurrency,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": engine.prefix_caching,
        "kv_cache_memory_bytes": engine.kv_cache_mib << 20,
        "async_scheduling": engine.scheduling == "async",
        "disable_log_stats": False,
        "seed": engine.seed,
        "tensor_parallel_size": engine.tensor_parallel,
        "pipeline_parallel_size": engine.pipeline_parallel,
        "structured_outputs_config": {
            "backend": cell.grammar.backend,
            "disable_any_whitespace": cell.grammar.disable_any_whitespace,
            **(reasoning(engine.reasoning_parser) if engine.reasoning_parser else {}),
        },
    }
    if workload.scenario is not None:
        setting = load_scenario(workload.scenario).setting
        arguments["max_model_len"] = setting.max_model_len
        if setting.reasoning == "qwen3":
            arguments["model"] = str(marks.tokenizer_folder(models.model_dir(cell.target.model)))
            arguments["structured_outputs_config"] |= {"reasoning_parser": "qwen3"}
        elif setting.reasoning:
            arguments["structured_outputs_config"] |= reasoning(MARKS)
    template = Path(arguments["model"]) / "chat_template.jinja"
    if template.is_file():  # the one that is used anyway; vLLM would load a processor to look for another
        arguments["chat_template"] = str(template)
    if engine.cudagraph_mode is not None:
        arguments["compilation_config"] = {"cudagraph_mode": engine.cudagraph_mode}
    if engine.lora:
        arguments["enable_lora"] = True
    if engine.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = engine.max_num_batched_tokens
    config = speculative_config(cell)
    if config is not None:
        arguments["speculative_config"] = config
        arguments["per_request_spec_decode_metrics"] = "detailed"
    return arguments
