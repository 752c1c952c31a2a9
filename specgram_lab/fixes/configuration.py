"""What a server was told that decides about the five reports. Requests are taken to ask for structured outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

Runner = Literal["v1", "v2"]
RUNNERS: Final[tuple[Runner, ...]] = get_args(Runner)
Device = Literal["cpu", "cuda"]
Graphs = Literal["none", "piecewise", "full"]
"""What CUDA graphs are captured of: nothing, the pieces between attention, or whole decode steps (too)."""


class ConfigurationError(ValueError):
    """A server command or an option of it that cannot be read."""


@dataclass(frozen=True)
class Configuration:
    """A server's settings; None is "not given", which leaves the choice to vLLM.

    ``drafter`` is vLLM's own word for the method (``draft_model`` where a model is named without one), ``k`` the number
    of speculative tokens, ``adaptive`` adaptive verification, ``backend`` what makes the grammars, ``compact``
    disable_any_whitespace. Without a ``device`` the server is taken to run where its build does.
    """

    drafter: str | None = None
    k: int | None = None
    adaptive: bool = False
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    runner: Runner | None = None
    pipeline_parallel: int = 1
    async_scheduling: bool | None = None
    backend: str | None = None
    compact: bool = False
    per_request_metrics: bool = False
    batch_sharded: bool = False
    local_argmax: bool = False
    lora: bool = False
    graphs: Graphs | None = None
    device: Device | None = None
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """What was read, in a line."""
        parts = [f"drafter {self.drafter}" + (f" k={self.k}" if self.k else "") if self.drafter else "no drafter"]
        parts += ["adaptive verification"] if self.adaptive else []
        parts += [f"reasoning parser {self.reasoning_parser}"] if self.reasoning_parser else []
        parts += [f"tool parser {self.tool_parser}"] if self.tool_parser else []
        parts += [f"runner {self.runner.upper()}"] if self.runner else []
        parts += [f"pipeline parallel {self.pipeline_parallel}"] if self.pipeline_parallel > 1 else []
        parts += {True: ["async scheduling"], False: ["sync scheduling"], None: []}[self.async_scheduling]
        parts += [f"backend {self.backend}"] if self.backend else []
        parts += ["disable_any_whitespace"] if self.compact else []
        parts += ["per-request metrics"] if self.per_request_metrics else []
        parts += ["batch-sharded sampling"] if self.batch_sharded else []
        parts += ["local argmax"] if self.local_argmax else []
        parts += ["LoRA"] if self.lora else []
        parts += [f"CUDA graphs {self.graphs}"] if self.graphs else []
        return ", ".join(parts)


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """The JSON object that a flag takes.

    Raises:
        ConfigurationError: it is none, with the position and the usual cause.
    """
    try:
        value = json.loads(text or "")
    except ValueError as error:
        raise ConfigurationError(
            f"{flag} is no JSON ({error}); inside it are double quotes, true and false, around it single quotes"
        ) from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{flag} takes a JSON object, got {text}")
    return value


def with_drafter(configuration: Configuration, speculative: Mapping[str, Any]) -> Configuration:
    """The configuration with the drafter of a ``--speculative-config``; an empty one leaves it as it is.

    Raises:
        ConfigurationError: an old spelling, or a value of the wrong kind.
    """
    found = {str(key).replace("-", "_"): value for key, value in speculative.items()}
    for key in found:
        if key.startswith("ngram_prompt_lookup_"):
            raise ConfigurationError(f"{key} is vLLM's old spelling, write {key.removeprefix('ngram_')}")
    if not found:
        return configuration
    method, model, tokens = found.get("method"), found.get("model"), found.get("num_speculative_tokens")
    if method is None and model is None:
        raise ConfigurationError("--speculative-config names neither a method nor a model")
    note = "no method is given: vLLM takes it from the draft model's config; draft_model is assumed here"
    return replace(
        configuration,
        drafter="draft_model" if method is None else _drafter(method),
        k=None if tokens is None else whole_number("num_speculative_tokens", tokens),
        adaptive=bool(found.get("enable_adaptive_verification")),
        local_argmax=bool(found.get("use_local_argmax_reduction")),
        notes=configuration.notes + ((note,) if method is None else ()),
    )


def _drafter(method: Any) -> str:
    """vLLM's names of MTP heads by model are one method."""
    if not isinstance(method, str) or not method:
        raise ConfigurationError(f"method in --speculative-config is a name such as mtp or ngram, got {method!r}")
    return "mtp" if method.endswith("_mtp") else method


def whole_number(name: str, value: Any) -> int:
    """A number from 1 on, as a flag or a JSON value gives it.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigurationError(f"{name} is a whole number from 1 on, got {value!r}")
    return number
