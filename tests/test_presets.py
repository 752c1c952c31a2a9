"""Public pairs of target and drafter: what they say, what is missing here, and their place in cells and notebooks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specgram_lab import hub, lab, models, presets
from specgram_lab.cli import app
from specgram_lab.fixes import command
from specgram_lab.spec import SpecError, parse_cell


@pytest.fixture
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def put(cache: Path, name: str) -> Path:
    """A model in a hub's cache, as its client lays it out."""
    entry = cache / f"models--{name.replace('/', '--')}"
    folder = entry / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("abc")
    return folder


def test_every_method_for_gpus_has_a_pair_that_says_where_it_comes_from() -> None:
    found = [presets.load(name) for name in presets.names()]
    assert {one.method for one in found} == {"dspark", "dflash", "dflash2", "eagle3", "mtp"}
    for one in found:
        assert one.status == "not run here"
        assert one.source.startswith("https://github.com/")
        assert (one.drafter is None) == (one.method == "mtp")


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_is_a_server_and_a_cell(name: str) -> None:
    preset = presets.load(name)
    server = command.of_command(preset.command)
    assert (server.drafter, server.k) == (preset.speculative_config["method"], preset.k)
    cell = parse_cell({**preset.parts, "workload": {"inline": ["x"]}})
    assert (cell.target.model, cell.drafter.method, cell.drafter.k) == (preset.target, preset.method, preset.k)
    assert cell.engine.device == "cuda"


def test_what_is_missing_is_said_and_what_is_there_is_not(empty_hub: Path) -> None:
    preset = presets.load("dspark-qwen3-8b")
    before = presets.missing(preset)
    assert [sentence for sentence in before if sentence.startswith(f"{preset.target} is not in {empty_hub}")]
    put(empty_hub, preset.target)
    after = presets.missing(preset)
    assert len(after) == len(before) - 1
    assert not [sentence for sentence in after if preset.target in sentence]
    assert [sentence for sentence in after if f"{preset.drafter} is not in" in sentence]


def test_an_older_build_is_missing_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgram_lab.capabilities.build", lambda: ("vllm", "0.9.2"))
    found = presets.missing(presets.load("dflash2-qwen3.8-27b"))
    assert "vllm 0.9.2 is installed, 0.28.0 or later is needed" in found


def test_too_small_a_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgram_lab.capabilities.has_cuda", lambda: True)
    monkeypatch.setattr("specgram_lab.presets.gpu_memory_gb", lambda: 24.0)
    found = presets.missing(presets.load("mtp-qwen3.8-27b"))
    assert "the source asks for 67 GB of GPU memory, the largest GPU here has 24 GB" in found


def test_an_unknown_preset_is_refused_with_the_names() -> None:
    with pytest.raises(SpecError, match="no preset 'nothing': there are dflash-"):
        presets.load("nothing")


def test_the_doctor_tells(empty_hub: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--preset", "mtp-mimo-7b", "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["command"].startswith("vllm serve XiaomiMiMo/MiMo-7B-Base --speculative-config ")
    assert any(str(empty_hub) in sentence for sentence in found["missing"])
    text = CliRunner().invoke(app, ["doctor", "--preset", "mtp-mimo-7b"]).stdout
    assert "preset mtp-mimo-7b (not run here): " in text
    assert text.count("missing here: ") == len(found["missing"])


def test_a_notebook_takes_a_presets_target_drafter_and_engine() -> None:
    own = [{"method": "none"}]
    assert lab.with_preset("", own) == {"drafters": own}
    cells = lab.grid(
        **lab.with_preset("eagle3-qwen3-8b", own), grammars=[{}], runners=["v2"], workload={"inline": ["x"]}
    )
    assert [cell.drafter.method for cell in cells] == ["none", "eagle3"]
    assert {cell.target.model for cell in cells} == {"Qwen/Qwen3-8B"}


def test_a_hub_model_is_its_cached_folder(empty_hub: Path) -> None:
    assert models.model_dir("some/model") == Path("some/model")
    with pytest.raises(models.ModelError, match=re.escape("target some/model is not in")):
        models.ensure("some/model")
    folder = put(empty_hub, "some/model")
    assert models.model_dir("some/model") == folder
    assert models.ensure("some/model") == folder
    assert not hub.is_name("./some")
    assert not hub.is_name(str(folder))
