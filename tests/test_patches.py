"""The registry of patches: refusal of unknown sources, undo, and what is reported as active."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from specgram_lab.patches import registry


def test_every_patch_is_defined_where_the_registry_says():
    for name in registry.names():
        patch = registry.get(name)
        assert patch.name == name
        assert patch.purpose
        assert patch.symbols


def test_every_symbol_of_every_patch_has_a_known_fingerprint():
    known = registry.known_fingerprints()
    missing = [symbol for name in registry.names() for symbol in registry.get(name).symbols if symbol not in known]
    assert missing == []


def test_an_unknown_patch_is_refused_with_the_known_ones():
    with pytest.raises(registry.PatchError, match=r"no patch .recoder.; there are .*recorder"):
        registry.get("recoder")


class Owner:
    value = 1

    @classmethod
    def name(cls) -> str:
        return cls.__name__


class Heir(Owner):
    pass


def test_undo_puts_everything_back_also_what_was_inherited():
    ended = []
    changes = registry.Replacements()
    original = changes.set(Heir, "name", classmethod(lambda cls: original() + "!"))
    changes.set(Owner, "value", 2)
    changes.at_end(lambda: ended.append(True))
    assert (Heir.name(), Heir.value, Owner.name()) == ("Heir!", 2, "Owner")
    changes.undo()
    assert (Heir.name(), Heir.value, Owner.name()) == ("Heir", 1, "Owner")
    assert "name" not in vars(Heir)
    assert ended == [True]


def pretend(monkeypatch, marks):
    patch = registry.Patch("pretended", "a test", ("logging:Logger.warning",), lambda changes, options: None)
    monkeypatch.setitem(registry.MODULES, "pretended", "specgram_lab.paths")
    monkeypatch.setattr(registry, "get", lambda name: patch)
    monkeypatch.setattr(registry, "known_fingerprints", lambda: marks)
    return patch


def test_a_source_that_was_never_studied_is_refused_with_both_fingerprints(monkeypatch):
    pretend(monkeypatch, {"logging:Logger.warning": {"0123456789abcdef": ["0.32.0"]}})
    mark = registry.fingerprint("logging:Logger.warning")
    with pytest.raises(registry.PatchError) as caught:
        registry.activate(["pretended"])
    assert f"its source has fingerprint {mark}, known are 0123456789abcdef in 0.32.0" in str(caught.value)
    assert registry.active() == {}


def test_what_is_active_is_reported_with_its_fingerprints(monkeypatch):
    mark = registry.fingerprint("logging:Logger.warning")
    pretend(monkeypatch, {"logging:Logger.warning": {mark: ["0.32.0"]}})
    registry.activate(["pretended"], {"pretended": {"a": 1}})
    assert registry.active() == {"pretended": {"options": {"a": 1}, "fingerprints": {"logging:Logger.warning": mark}}}
    registry.change("pretended", {"a": 2})
    assert registry.active()["pretended"]["options"] == {"a": 2}
    registry.deactivate("pretended")
    assert registry.active() == {}


def test_comments_layout_and_docstrings_do_not_change_a_fingerprint(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "one.py").write_text(
        'def f(a):\n    """Say."""\n    # why\n    return (a\n        + 1)\n', encoding="utf-8"
    )
    (tmp_path / "two.py").write_text("def f(a):\n    return a + 1\n", encoding="utf-8")
    (tmp_path / "three.py").write_text("def f(a):\n    return a + 2\n", encoding="utf-8")
    one, two, three = (registry.fingerprint(f"{name}:f") for name in ("one", "two", "three"))
    assert one == two != three


SCRIPT = """
import json, logging
import vllm.v1.worker.cpu.shm
from specgram_lab import patches
from vllm.v1.core.sched.scheduler import Scheduler
before = Scheduler.update_from_output, len(logging.getLogger("vllm.v1.structured_output").handlers)
patches.activate(["recorder", "async-on-cpu"])
during = Scheduler.update_from_output is not before[0]
names = sorted(patches.active())
for name in names:
    patches.deactivate(name)
after = Scheduler.update_from_output, len(logging.getLogger("vllm.v1.structured_output").handlers)
print(json.dumps({"during": during, "names": names, "same": before == after}))
"""


@pytest.mark.engine
def test_patches_of_the_installed_vllm_fit_and_come_off_again():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report == {"during": True, "names": ["async-on-cpu", "recorder"], "same": True}


def test_the_plugin_does_nothing_where_nothing_is_asked(monkeypatch):
    from specgram_lab.patches import plugin

    monkeypatch.delenv(plugin.PATCHES, raising=False)
    before = dict(logging.Logger.manager.loggerDict)
    plugin.register()
    assert registry.active() == {}
    assert dict(logging.Logger.manager.loggerDict) == before


def test_a_patch_taken_off_first_leaves_the_later_one_on_and_nothing_behind(monkeypatch):
    def wrapping(word):
        def apply(changes, options):
            original = changes.set(Owner, "name", classmethod(lambda cls: f"{word}({original()})"))

        return registry.Patch(word, "a test", ("logging:Logger.warning",), apply)

    made = {word: wrapping(word) for word in ("first", "second")}
    monkeypatch.setattr(registry, "get", made.__getitem__)
    monkeypatch.setattr(registry, "check", lambda patch: {})
    monkeypatch.setattr(registry, "_ACTIVE", {})
    registry.activate(["first", "second"])
    assert Owner.name() == "second(first(Owner))"
    registry.deactivate("first")
    assert (Owner.name(), list(registry.active())) == ("second(Owner)", ["second"])
    registry.deactivate("second")
    assert (Owner.name(), registry.active()) == ("Owner", {})
