"""Registration in vLLM, the survey, the interpreter's mends, and the backend that stands in for Triton's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specgram_lab.builders.cpu import interpreter, kernels

REPOSITORY = Path(__file__).parents[2]


def python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter."""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), variables.get("PYTHONPATH", "")])} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


REGISTER = """
import json, torch, triton.backends
from triton.backends import Backend
from specgram_lab.builders.cpu.triton_backend.compiler import InterpretedOnly
from specgram_lab.builders.cpu.triton_backend.driver import InterpreterDriver
triton.backends.backends["cpu"] = Backend(compiler=InterpretedOnly, driver=InterpreterDriver)
from specgram_lab.builders.cpu import interpreter, kernels
interpreter.install()
import vllm.v1.worker.cpu.shm
names = kernels.register()
again = kernels.register()
from vllm.v1.worker.gpu.sample import gumbel
row = torch.zeros(1, 64)
row[0, 9] = 1
def sample(logits):
    one = torch.tensor([1])
    return gumbel.gumbel_sample(logits, torch.tensor([0]), torch.tensor([0.0]), one, one, False, False)
tokens = [int(sample(row)), int(sample(row.half()))]
survey = kernels.survey()
print(json.dumps([names, again, tokens, kernels.interpreted_launches(), kernels.native_launches(), survey]))
"""


WITHOUT_SEAM = """
import sys
sys.modules["vllm.triton_utils.dispatcher"] = None  # as in vLLM before 0.31
""" + REGISTER.replace(
    "names = kernels.register()",
    "from specgram_lab.patches.registry import Replacements\nchanges = Replacements()\n"
    "before = {name: kernels.find(name) for name in kernels.NATIVE}\nnames = kernels.register(changes)",
).replace(
    "print(",
    "changes.undo()\nback = all(kernels.find(name) is kernel for name, kernel in before.items())\nprint(back and ",
)


@pytest.fixture(scope="module")
def registered():
    return json.loads(python(REGISTER, TRITON_INTERPRET="1"))


def test_every_native_kernel_fits_the_installed_build(registered):
    names, again, *_ = registered
    assert names == again
    assert set(names) == set(kernels.NATIVE), "a kernel changed its parameters or its place"


def test_a_native_kernel_runs_and_declines_what_it_does_not_cover(registered):
    _, _, tokens, interpreted, native, _ = registered
    name = "vllm.v1.worker.gpu.sample.gumbel._gumbel_sample_kernel"
    assert tokens == [9, 9]
    assert native == {name: 1}
    assert interpreted == {name: 1}  # float16


def test_a_build_without_the_seam_gets_them_like_any_patch_and_loses_them_again():
    names, again, tokens, _, native, survey = json.loads(python(WITHOUT_SEAM, TRITON_INTERPRET="1"))
    assert set(names) == set(again) == set(kernels.NATIVE)
    assert tokens == [9, 9]
    assert native == {"vllm.v1.worker.gpu.sample.gumbel._gumbel_sample_kernel": 1}
    assert "native" in survey.values()


def test_survey_names_what_is_native_and_what_is_unknown(registered):
    names, *_, survey = registered
    assert {name for name, state in survey.items() if state == "native"} == set(names)
    assert survey["vllm.v1.worker.gpu.sample.watermark._philox_gumbel_kernel"] == "unknown"


def test_a_kernel_with_other_parameters_is_left_alone():
    class Changed:
        arg_names = ("logits_ptr", "something_new")

    name = "vllm.v1.worker.gpu.sample.min_p._min_p_kernel"
    assert not kernels._fits(Changed, kernels.NATIVE[name])
    assert kernels._fits(kernels.find(name), kernels.NATIVE[name])


def test_a_kernel_with_another_body_is_left_alone(monkeypatch):
    name = "vllm.v1.worker.gpu.sample.min_p._min_p_kernel"
    known = {**kernels.known_marks(), name: {"0123456789abcdef": ["0.0.1"]}}
    monkeypatch.setattr(kernels, "known_marks", lambda: known)
    assert not kernels._fits(kernels.find(name), kernels.NATIVE[name])


def test_driver_is_active_only_for_the_interpreter_without_a_gpu():
    code = """
import triton.backends
from triton.backends import Backend
from specgram_lab.builders.cpu.triton_backend.compiler import InterpretedOnly
from specgram_lab.builders.cpu.triton_backend.driver import InterpreterDriver
class Gpu:
    @staticmethod
    def is_active(): return True
states = [InterpreterDriver.is_active()]
triton.backends.backends["gpu"] = Backend(compiler=InterpretedOnly, driver=Gpu)
states.append(InterpreterDriver.is_active())
print(states)
"""
    assert python(code, TRITON_INTERPRET="1") == "[True, False]"
    assert python(code) == "[False, False]"


def test_backend_modules_hold_exactly_one_class_each():
    """Triton's discovery takes the only concrete subclass of its base classes and fails on any other number."""
    from triton.backends import _find_concrete_subclasses
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    from specgram_lab.builders.cpu.triton_backend import compiler, driver

    assert _find_concrete_subclasses(compiler, BaseBackend) is compiler.InterpretedOnly
    assert _find_concrete_subclasses(driver, DriverBase) is driver.InterpreterDriver


def test_importing_the_packages_imports_neither_torch_nor_vllm():
    code = """
import sys
import specgram_lab, specgram_lab.builders.cpu, specgram_lab.builders.cpu.kernels, specgram_lab.builders.cpu.interpreter
print([name for name in ("torch", "vllm", "triton", "numba") if name in sys.modules])
"""
    assert python(code) == "[]"


def test_the_mended_interpreter_survives_blocks_of_nan():
    from vllm.v1.worker.gpu.sample import gumbel

    before = sum(interpreter.interpreted_launches().values())
    logits = torch.full((1, 8), torch.nan)
    tokens = gumbel.gumbel_sample(
        logits, torch.tensor([0]), torch.tensor([0.0]), torch.tensor([1]), torch.tensor([1]), False, False
    )
    assert tokens.tolist() == [0]
    assert sum(interpreter.interpreted_launches().values()) == before + 1
