"""What to run: frozen, validated models with canonical JSON, a cell id, and YAML in and out."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from specgram_lab.av import costs
from specgram_lab.av.costs import CostCurve

SPEC_VERSION = 1
"""Part of every cell id. History: 1, the first layout."""

Method = Literal[
    "none", "ngram", "ngram_gpu", "draft_model", "eagle3", "mtp", "dflash", "dflash2", "dspark", "suffix", "scripted"
]
GrammarKind = Literal["none", "json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag"]
NEEDS_WEIGHTS: frozenset[str] = frozenset({"draft_model", "eagle3", "mtp", "dflash", "dflash2", "dspark"})
BLOCKS: frozenset[str] = frozenset({"dflash", "dflash2", "dspark"})
"""Methods that propose a block of one length in one pass: another k is another proposal."""


class SpecError(ValueError):
    """A spec that cannot be run, said in one sentence."""


class Model(BaseModel):
    """Base of all specs: frozen, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        """YAML and JSON know lists only; the models hold tuples, and whole numbers may stand for real ones."""
        if not isinstance(value, dict):
            return value
        ordered = {key for key, field in cls.model_fields.items() if get_origin(field.annotation) is tuple}
        return {key: tuple(item) if key in ordered and isinstance(item, list) else item for key, item in value.items()}


class Target(Model):
    """The model whose tokens are produced.

    ``model`` is a name from `specgram_lab.models` (``smollm2-135m``), a folder with safetensors, or,
    on a machine that reaches a hub, a hub name.
    """

    model: str = "smollm2-135m"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    max_model_len: Annotated[int, Field(ge=16)] = 1024


class Drafter(Model):
    """What proposes tokens. ``k`` is vLLM's ``num_speculative_tokens``; 0 goes with ``method: none`` only.

    ``model: target`` makes the target its own draft model. ``prompt_lookup_min`` and ``prompt_lookup_max``
    belong to ``ngram``; where one of them is missing vLLM sets both to the other, and to 5 where both are.
    ``local_argmax`` is vLLM's ``use_local_argmax_reduction``.
    """

    method: Method = "none"
    k: Annotated[int, Field(ge=0, le=64)] = 0
    model: str | None = None
    prompt_lookup_min: Annotated[int, Field(ge=1)] | None = None
    prompt_lookup_max: Annotated[int, Field(ge=1)] | None = None
    rejection: Literal["standard", "synthetic"] = "standard"
    synthetic_rates: tuple[float, ...] = ()
    local_argmax: bool = False

    @model_validator(mode="before")
    @classmethod
    def _old_spelling(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise SpecError(
                    f"drafter is a text that is not JSON at column {error.colno}; JSON wants double quotes and true"
                ) from None
        if isinstance(value, dict):
            for key in value:
                if isinstance(key, str) and key.startswith("ngram_prompt_lookup_"):
                    raise SpecError(f"{key} is vLLM's old spelling, write {key.removeprefix('ngram_')}")
                if key == "num_speculative_tokens":
                    raise SpecError("num_speculative_tokens is called k here")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.method == "none") != (self.k == 0):
            raise SpecError(f"drafter {self.method} with k={self.k}: k is 0 for none and at least 1 for every other")
        if self.method in NEEDS_WEIGHTS and self.model is None:
            raise SpecError(f"drafter {self.method} needs model: a name, a folder, or target for the target itself")
        if self.method not in NEEDS_WEIGHTS and self.model is not None:
            raise SpecError(f"drafter {self.method} takes no model, got {self.model!r}")
        lookup = (self.prompt_lookup_min, self.prompt_lookup_max)
        if self.method not in ("ngram", "ngram_gpu") and lookup != (None, None):
            raise SpecError(f"prompt_lookup_min and prompt_lookup_max belong to ngram, not to {self.method}")
        if lookup[0] is not None and lookup[1] is not None and lookup[0] > lookup[1]:
            raise SpecError(f"prompt_lookup_min {lookup[0]} is larger than prompt_lookup_max {lookup[1]}")
        if (self.rejection == "synthetic") != bool(self.synthetic_rates):
            raise SpecError("synthetic_rates and rejection: synthetic go together")
        if self.synthetic_rates and len(self.synthetic_rates) != self.k:
            raise SpecError(f"synthetic_rates has {len(self.synthetic_rates)} rates for k={self.k}")
        if not all(1 >= a >= b >= 0 for a, b in zip((1.0, *self.synthetic_rates), self.synthetic_rates, strict=False)):
            raise SpecError(f"synthetic_rates are between 0 and 1 and never rise, got {list(self.synthetic_rates)}")
        return self

    @property
    def effective_lookup(self) -> tuple[int, int] | None:
        """(min, max) as vLLM 0.28 to 0.33 fills them in (`SpeculativeConfig.__post_init__`); None if not ngram."""
        if self.method not in ("ngram", "ngram_gpu"):
            return None
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None and high is None:
            return (5, 5)
        return (low if low is not None else high or 5, high if high is not None else low or 5)


class Grammar(Model):
    """What the output must obey.

    ``value`` holds the schema, the regex, the EBNF text, the list of choices or the structural tag. A YAML
    file may say ``file: NAME`` instead (relative to itself, or a name in ``data/schemas``); it is read into
    ``value``, so that a cell id names the content. ``per_prompt`` takes the schema that each prompt brings.
    """

    kind: GrammarKind = "none"
    value: JsonValue = None
    name: str | None = None
    per_prompt: bool = False
    backend: Literal["auto", "xgrammar", "guidance"] = "xgrammar"
    disable_any_whitespace: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind in ("none", "json_object"):
            if self.value is not None or self.per_prompt:
                raise SpecError(f"grammar {self.kind} takes no value")
        elif self.per_prompt:
            if self.kind != "json_schema" or self.value is not None:
                raise SpecError("per_prompt belongs to grammar json_schema without a value")
        elif self.value is None:
            raise SpecError(f"grammar {self.kind} needs a value")
        elif self.kind in ("regex", "ebnf") and not (isinstance(self.value, str) and self.value.strip()):
            raise SpecError(f"grammar {self.kind} needs a text that is not empty, got {self.value!r}")
        elif self.kind == "choice" and not (
            isinstance(self.value, list) and self.value and all(isinstance(v, str) for v in self.value)
        ):
            raise SpecError(f"grammar choice needs a list of texts that cannot be an empty list, got {self.value!r}")
        elif self.kind == "json_schema" and not isinstance(self.value, dict | bool):
            raise SpecError(f"grammar json_schema needs an object, got {type(self.value).__name__}")
        elif self.kind == "structural_tag" and not isinstance(self.value, dict):
            raise SpecError(f"grammar structural_tag needs an object, got {type(self.value).__name__}")
        if self.disable_any_whitespace and self.backend == "auto":
            raise SpecError("disable_any_whitespace needs backend xgrammar or guidance; vLLM refuses it with auto")
        return self

    @property
    def label(self) -> str:
        """A short name for tables: ``name`` if given, else the kind."""
        return self.name or self.kind


class Workload(Model):
    """Which prompts, how many, and how they are sampled. ``scenario`` replaces the prompts on a scripted engine.

    ``prompts`` is a name in ``data/prompts`` or the path of a JSONL file; ``inline`` gives texts instead.
    ``concurrency`` is how many requests are in the engine at once (the engine's ``max_num_seqs``).
    """

    prompts: str | None = None
    inline: tuple[str, ...] = ()
    scenario: str | None = None
    limit: Annotated[int, Field(ge=1)] | None = None
    repeats: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=1)] = 128
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    logit_bias: dict[str, float] = {}
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    ignore_eos: bool = False
    concurrency: Annotated[int, Field(ge=1)] = 4
    seed: int | None = 0

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [s for s in ("prompts", "inline", "scenario") if getattr(self, s)]
        if len(sources) != 1:
            raise SpecError(f"workload needs exactly one of prompts, inline, scenario; got {sources or 'none'}")
        if self.min_tokens > self.max_tokens:
            raise SpecError(f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}")
        for key in self.logit_bias:
            if not key.isdecimal():
                raise SpecError(f"logit_bias has the key {key!r}, token ids are wanted")
        return self


class Budget(Model):
    """How adaptive verification (AV) picks its draft budget; ``off`` switches AV off.

    ``native`` is vLLM's argmax over a cost curve; ``all``, ``none``; ``fixed`` n per step; ``per_request`` n;
    ``fraction`` of the scheduled drafts; ``schedule`` takes one number a step from the scenario.
    ``costs`` is a curve of `specgram_lab.av.costs`, by name; it is read in, so that a cell id names its numbers.
    Without it CUDA takes what vLLM profiled, and a CPU ``verify_cost`` (a, b): verifying n tokens is taken to cost
    a + b * n.
    """

    policy: Literal["off", "native", "all", "none", "fixed", "per_request", "fraction", "schedule"] = "off"
    value: Annotated[float, Field(ge=0)] | None = None
    verify_cost: tuple[float, float] = (1.0, 0.3)
    costs: CostCurve | None = None

    @field_validator("costs", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if isinstance(value, CostCurve) or value is None:
            return value
        try:
            return costs.load(value) if isinstance(value, str) else CostCurve.model_validate(value, strict=False)
        except costs.CostError as error:
            raise SpecError(str(error)) from None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        needs = self.policy in ("fixed", "per_request", "fraction")
        if needs != (self.value is not None):
            raise SpecError(f"budget {self.policy} {'needs' if needs else 'takes no'} value")
        if self.policy == "fraction" and self.value is not None and self.value > 1:
            raise SpecError(f"budget fraction is at most 1, got {self.value}")
        if self.policy in ("fixed", "per_request") and self.value is not None and self.value % 1:
            raise SpecError(f"budget {self.policy} is a whole number of tokens, got {self.value}")
        if min(self.verify_cost) < 0:
            raise SpecError(f"verify_cost has a negative number: {list(self.verify_cost)}")
        return self

    @property
    def label(self) -> str:
        """The policy with its number or its cost curve, for tables: ``per_request(2)``, ``native(NAME)``."""
        if self.policy == "native" and self.costs is not None:
            return f"native({self.costs.name})"
        return self.policy if self.value is None else f"{self.policy}({self.value:g})"


class Engine(Model):
    """Which engine, and how it is set up. ``auto`` is resolved, and what it became is stored with the run.

    ``build`` is the release of an installed build (`specgram_lab.builds`); ``python`` the interpreter of any other one.
    ``patches`` are names from `specgram_lab.patches`, beyond those that the builder needs by itself;
    ``reasoning_parser`` is one of vLLM's, or ``specgram_fence``, for a target that fences its answers;
    ``cudagraph_mode`` is asked of vLLM, which may take another, and ``lora`` lets adapters be loaded. A ``server`` is
    seen from outside: ``url`` is where it is, ``log`` the file that it logs to, and ``target.model`` the name that it
    serves the model under.
    """

    kind: Literal["local", "scripted", "server"] = "local"
    url: str | None = None
    log: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    runner: Literal["v1", "v2"] = "v1"
    scheduling: Literal["sync", "async"] = "sync"
    budget: Budget = Budget()
    patches: tuple[str, ...] = ()
    build: str | None = None
    python: str | None = None
    record: bool = True
    prefix_caching: bool = False
    enforce_eager: bool = True
    cudagraph_mode: Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"] | None = None
    lora: bool = False
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    kv_cache_mib: Annotated[int, Field(ge=16)] = 512
    reasoning_parser: str | None = None
    seed: int = 0

    @field_validator("url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not re.fullmatch(r"https?://[^/?#]+(/[^?#]*)?", value):
            shown = value.rpartition("@")[2].partition("?")[0]
            raise SpecError(f"url {shown!r} is no address of a server: http://HOST:PORT without a query is wanted")
        if "@" in value.partition("//")[2].partition("/")[0]:
            raise SpecError("url holds a user or a password; put a key into the environment variable SPECGRAM_API_KEY")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _server(self) -> Self:
        if (self.kind == "server") != (self.url is not None):
            raise SpecError("engine server and url go together")
        if self.kind != "server" and self.log is not None:
            raise SpecError("log belongs to engine server; other engines' logs are kept with their cells")
        if self.kind == "server" and (self.patches or self.budget.policy != "off" or self.python or self.build):
            raise SpecError("engine server takes no patches, budget or python, and no build: it is seen from outside")
        if self.build is not None and self.python is not None:
            raise SpecError("build and python both name an interpreter; give one of them")
        return self

    @field_validator("build")
    @classmethod
    def _release(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\d+\.\d+\.\d+", value):
            raise SpecError(f"build {value!r} is no release; 0.28.0 would be one")
        return value

    @field_validator("patches")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise SpecError(f"patches names one twice: {', '.join(value)}")
        return tuple(sorted(value))


class Limits(Model):
    """When a cell is ended. Limits are no part of the cell id: they change what is spent, not what is asked."""

    timeout_s: Annotated[float, Field(gt=0)] = 900.0
    memory_mib: Annotated[int, Field(ge=256)] | None = None


class Cell(Model):
    """One engine configuration on one workload: the unit that runs, ends in one row, and is done or not."""

    target: Target = Target()
    drafter: Drafter = Drafter()
    grammar: Grammar = Grammar()
    workload: Workload
    engine: Engine = Engine()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        scenario = self.workload.scenario is not None
        if self.drafter.method == "scripted" and not scenario:
            raise SpecError("drafter scripted needs workload.scenario")
        if scenario and self.drafter.method not in ("scripted", "none"):
            raise SpecError(f"a scenario brings its own drafts; drafter {self.drafter.method} cannot go with it")
        if self.engine.budget.policy == "schedule" and not scenario:
            raise SpecError("budget schedule takes its numbers from workload.scenario, which is missing")
        if self.grammar.per_prompt and self.workload.inline:
            raise SpecError("per_prompt takes the schemas of a prompt file; inline texts bring none")
        if not scenario and self.engine.kind != "server" and self.workload.max_tokens >= self.target.max_model_len:
            raise SpecError(
                f"max_tokens {self.workload.max_tokens} leaves no room for a prompt in max_model_len"
                f" {self.target.max_model_len}"
            )
        if scenario and self.engine.kind == "server":
            raise SpecError("a scenario cannot run on engine server: it needs a drafter of the lab's own")
        if self.engine.kind == "scripted" and not scenario:
            raise SpecError("engine scripted needs workload.scenario")
        if scenario and self.grammar.kind != "none":
            raise SpecError("a scenario brings its own grammars; leave grammar out")
        if self.engine.max_num_batched_tokens is not None:
            reserved = self.drafter.k * self.workload.concurrency
            if self.engine.max_num_batched_tokens <= reserved:
                raise SpecError(
                    f"max_num_batched_tokens {self.engine.max_num_batched_tokens} leaves no room beside"
                    f" k {self.drafter.k} x concurrency {self.workload.concurrency} = {reserved} draft slots;"
                    f" {reserved + 256} would work"
                )
        return self

    def canonical(self) -> str:
        """Canonical JSON of what is asked: sorted keys, no blanks, limits and paths left out."""
        hidden: dict[str, Any] = {"python": True, "log": True}
        hidden |= {name: True for name in ("url", "build", "cudagraph_mode", "lora") if not getattr(self.engine, name)}
        hidden |= {"budget": {"costs"}} if self.engine.budget.costs is None else {}
        left_out: dict[str, Any] = {"limits": True, "engine": hidden}
        left_out |= {} if self.drafter.local_argmax else {"drafter": {"local_argmax"}}
        content = self.model_dump(mode="json", exclude=left_out)
        return json.dumps({"spec_version": SPEC_VERSION, **content}, sort_keys=True, separators=(",", ":"))

    @property
    def cell_id(self) -> str:
        """A readable slug and 12 hex digits of the SHA-256 of `canonical`."""
        parts: list[str] = [self.engine.kind, self.engine.runner, self.engine.scheduling, self.drafter.method]
        parts += [f"k{self.drafter.k}", self.workload.scenario or self.grammar.label]
        slug = re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")[:60]
        return f"{slug}-{hashlib.sha256(self.canonical().encode()).hexdigest()[:12]}"


def explain(error: ValidationError) -> str:
    """One sentence for the first fault that pydantic found: where, what, and what was given."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"]) or "cell"
    if fault["type"] == "extra_forbidden":
        return f"{where} is not a known key"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{where}: {message}"
    return f"{where}: {message[0].lower()}{message[1:]}, got {fault['input']!r}"


def parse_cell(content: Any, base: Path | None = None) -> Cell:
    """A `Cell` from plain data. ``base`` is the folder that paths in it are relative to, if they are there.

    Raises:
        SpecError: one sentence that names the key, what was wrong and what is allowed.
    """
    if not isinstance(content, dict):
        raise SpecError(f"a cell is a mapping, got {type(content).__name__}")
    content = dict(content)
    grammar = content.get("grammar")
    if isinstance(grammar, dict) and "file" in grammar:
        content["grammar"] = _inline(dict(grammar), base or Path())
    for part, key in _PATHS if base is not None else ():
        owner = content.get(part)
        if isinstance(owner, dict) and isinstance(owner.get(key), str) and (base / owner[key]).exists():
            content[part] = {**owner, key: str(base / owner[key])}
    try:
        return Cell.model_validate(content)
    except ValidationError as error:
        raise SpecError(explain(error)) from None


_PATHS = (
    ("workload", "prompts"), ("workload", "scenario"), ("target", "model"), ("drafter", "model"), ("engine", "log"),
)  # fmt: skip


def _inline(grammar: dict[str, Any], base: Path) -> dict[str, Any]:
    from specgram_lab.paths import data_file

    name = grammar.pop("file")
    path = data_file("schemas", name, base)
    try:
        text = path.read_text(encoding="utf-8")
        is_json = grammar.get("kind") in ("json_schema", "structural_tag", "choice")
        grammar["value"] = json.loads(text) if is_json else text
    except json.JSONDecodeError as error:
        raise SpecError(f"{path} is not JSON in line {error.lineno} at column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 at byte {error.start + 1}") from None
    grammar.setdefault("name", path.stem)
    return grammar


class _OnceLoader(yaml.SafeLoader):
    """YAML's safe loader, for which a key that occurs twice in a mapping is a fault and not the last one's."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping; raises `yaml.YAMLError` for a key that occurs twice."""
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} occurs twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """What stands in a YAML (or JSON) file.

    Raises:
        SpecError: it cannot be read, is not UTF-8, is not YAML, or has a key twice; the file and the place are named.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)  # noqa: S506  a safe loader
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 at byte {error.start + 1}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise SpecError(f"{path} is not YAML{line}: {getattr(error, 'problem', error)}") from None


def load_cell(path: Path) -> Cell:
    """A `Cell` from a YAML (or JSON) file; raises `SpecError` with the file's name in front."""
    content = read_yaml(path)
    try:
        return parse_cell(content, path.parent)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def dump_cell(cell: Cell) -> str:
    """YAML of a cell; `load_cell` gives the same cell back."""
    content = cell.model_dump(mode="json", exclude_defaults=True)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    if yaml.safe_load(text) == content:
        return text
    return yaml.safe_dump(content, sort_keys=False)  # a text with a line break of Unicode's own, which YAML folds
