"""A server's configuration, read from the command that starts it or from single options."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import yaml

from specgram_lab.fixes.configuration import (
    RUNNERS,
    Configuration,
    ConfigurationError,
    Device,
    Graphs,
    Runner,
    json_object,
    whole_number,
    with_drafter,
)

LEVEL: Final = "optimization-level"
SHORT: Final = {"-sc": "speculative-config", "-pp": "pipeline-parallel-size", "-cc": "compilation-config", "-O": LEVEL}
ALIASES: Final = {"structured-outputs": "structured-outputs-config"}
"""argparse takes the beginning of a flag for the flag; this one is seen in reports."""
OBJECTS: Final = ("speculative-config", "structured-outputs-config", "compilation-config")
VALUES: Final = (
    "spec-method", "spec-model", "spec-tokens", "reasoning-parser", "tool-call-parser", "pipeline-parallel-size",
    "per-request-spec-decode-metrics", "config", LEVEL,
)  # fmt: skip
SWITCHES: Final = ("async-scheduling", "enable-batch-sharded-sampling", "enable-lora", "enforce-eager")
COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
QUOTED: Final = re.compile(r"\bvllm\s+serve\s")
"""A whole command that is one word, as in ``bash -c '...'``."""
END: Final = re.compile(r"(\||\|\||&|&&|;|\d?>.*)")
"""A token of the shell behind which the command is over."""


def of_command(text: str, base: Path = Path()) -> Configuration:
    """The configuration in a server's command.

    Args:
        text: ``vllm serve ...``, the module form, a docker line or flags alone, as typed or in a script: continued
            lines, comments, variables set in front and a command quoted for another shell are understood.
        base: Folder that a ``--config`` file is relative to.

    Raises:
        ConfigurationError: quotes that are not closed, two servers, no flag at all, or a value that cannot be read.
    """
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", COLOURS.sub("", text)), comments=True)
        words = [part for word in words for part in (shlex.split(word) if QUOTED.search(word) else [word])]
    except ValueError as error:
        raise ConfigurationError(f"the server command cannot be split into words: {error}") from error
    starts = [i for i, word in enumerate(words) if word == "serve" or word.endswith("entrypoints.openai.api_server")]
    if len(starts) > 1:
        raise ConfigurationError(f"the text holds {len(starts)} server commands; give one")
    environment = dict(word.split("=", 1) for word in words if re.match(r"VLLM_\w+=", word))
    arguments = words[starts[0] + 1 :] if starts else words
    ended = next((i for i, word in enumerate(arguments) if END.fullmatch(word)), len(arguments))
    flags, ignored = _flags(arguments[:ended])
    if not flags and not ignored and not starts:
        raise ConfigurationError(f"there is no flag of vLLM in {text.strip()[:60]!r}")
    if "config" in flags:
        flags = _config_file(base / str(flags.pop("config"))) | flags
    notes = (f"not read, as they decide nothing here: {', '.join(dict.fromkeys(ignored))}",) if ignored else ()
    return _configuration(flags, environment, notes)


def of_options(server_command: str | None, speculative_config: str | None, **given: Any) -> Configuration | None:
    """The configuration in a server's command (or a file with it) and in single options, which count for more.

    Args:
        server_command: The command itself, or the path of a file that holds it.
        speculative_config: The JSON that vLLM's flag of that name takes.
        given: Fields of `Configuration`; None leaves one as it is.

    Returns:
        None if nothing at all was given.

    Raises:
        ConfigurationError: something of it cannot be read.
    """
    for name, allowed in (("runner", RUNNERS), ("device", get_args(Device))):
        if given.get(name) is not None and given[name] not in allowed:
            raise ConfigurationError(f"--{name} is one of {', '.join(allowed)}, got {given[name]!r}")
    single = {name: value for name, value in given.items() if value is not None}
    if server_command is None and speculative_config is None and not single:
        return None
    found = Configuration()
    if server_command is not None:
        one_word = len(server_command.split()) == 1 and not server_command.startswith("-")
        found = _of_file(Path(server_command)) if one_word else of_command(server_command)
    if speculative_config is not None:
        found = with_drafter(found, json_object("--speculative-config", speculative_config))
    return replace(found, **single)


def _of_file(path: Path) -> Configuration:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"the server command is no command and no file: {path}: {error.strerror}") from error
    if "\0" in text:
        raise ConfigurationError(f"{path} is no text")
    try:
        return of_command(text, path.parent)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _flags(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The flags that are read, with their values, and the names of the others."""
    flags: dict[str, Any] = {}
    ignored = []
    for name, value in _pairs(arguments):
        head, _, path = name.partition(".")
        if head in OBJECTS and path:
            _put(flags.setdefault(head, {}), path.split("."), _scalar(value))
        elif name == "compilation-config" and not (value or "").startswith("{"):
            ignored.append(f"--{name}")  # a level, or a variable of the shell
        elif name in OBJECTS:
            flags[name] = flags.get(name, {}) | json_object(f"--{name}", value)
        elif name in VALUES:
            if value is None:
                raise ConfigurationError(f"--{name} has no value")
            flags[name] = value
        elif name.removeprefix("no-") in SWITCHES:
            flags[name.removeprefix("no-")] = not name.startswith("no-")
        else:
            ignored.append(f"--{name}" if not name.startswith("-") else name)
    return flags, ignored


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each flag's name, without ``--`` and with dashes, and the word that follows it unless that is a flag too."""
    for i, word in enumerate(arguments):
        if not re.match(r"--?[A-Za-z]", word):
            continue
        name, equals, value = re.sub(r"^-O(?=\d)", "-O=", word).partition("=")
        head, dot, rest = name.partition(".")
        head = SHORT.get(head, head)
        head = head[2:].replace("_", "-") if head.startswith("--") else head
        head = ALIASES.get(head, head)
        following = arguments[i + 1] if i + 1 < len(arguments) else None
        if not equals and following is not None and not re.match(r"--?[A-Za-z]", following):
            yield head + dot + rest, following
        else:
            yield head + dot + rest, value if equals else None


def _put(target: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        target = target.setdefault(name, {})
    target[path[-1]] = value


def _scalar(text: str | None) -> Any:
    try:
        return json.loads(text or "")
    except ValueError:
        return text


def _config_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"--config {path} holds no mapping of flags")
    arguments = []
    for key, value in content.items():
        if isinstance(value, bool):
            arguments.append(f"--{key}" if value else f"--no-{key}")
        else:
            arguments += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return _flags(arguments)[0]


def _configuration(flags: Mapping[str, Any], environment: Mapping[str, str], notes: tuple[str, ...]) -> Configuration:
    outputs = flags.get("structured-outputs-config", {})
    speculative = dict(flags.get("speculative-config", {}))
    for flag, key in (("spec-method", "method"), ("spec-model", "model"), ("spec-tokens", "num_speculative_tokens")):
        if flag in flags:
            speculative[key] = flags[flag]
    found = Configuration(
        reasoning_parser=flags.get("reasoning-parser") or outputs.get("reasoning_parser") or None,
        tool_parser=flags.get("tool-call-parser"),
        runner=_runner(environment.get("VLLM_USE_V2_MODEL_RUNNER")),
        pipeline_parallel=whole_number("--pipeline-parallel-size", flags.get("pipeline-parallel-size", 1)),
        async_scheduling=flags.get("async-scheduling"),
        backend=outputs.get("backend"),
        compact=bool(outputs.get("disable_any_whitespace")),
        per_request_metrics=flags.get("per-request-spec-decode-metrics", "none") != "none",
        batch_sharded=bool(flags.get("enable-batch-sharded-sampling")),
        lora=bool(flags.get("enable-lora")),
        graphs=_graphs(flags),
        notes=notes,
    )
    return with_drafter(found, speculative)


def _graphs(flags: Mapping[str, Any]) -> Graphs | None:
    """`--enforce-eager`, else ``cudagraph_mode`` (a name or vLLM's number), else the optimization level.

    None where none of them is given, and for a level that leaves full graphs.
    """
    if flags.get("enforce-eager"):
        return "none"
    mode = flags.get("compilation-config", {}).get("cudagraph_mode")
    if mode is None:
        levels: dict[str, Graphs] = {"0": "none", "1": "piecewise"}
        return levels.get(str(flags.get(LEVEL)))
    names: dict[str, Graphs] = {"NONE": "none", "0": "none", "PIECEWISE": "piecewise", "1": "piecewise"}
    return names.get(str(mode).upper(), "full")


def _runner(value: str | None) -> Runner | None:
    """`VLLM_USE_V2_MODEL_RUNNER` as vLLM reads it."""
    if value is None or not value:
        return None
    return "v2" if value.lower() in ("1", "true") else "v1"
