# ruff: noqa: E402 - the environment must be set before triton is imported
"""Set-up of the kernel tests: Triton's interpreter as the oracle, in the process of the tests.

Triton decides at decoration time whether a kernel is interpreted, so the variable must be set while triton and
vLLM's modules are imported. What is set here is taken back afterwards: other tests start processes that would
inherit it.
"""

import os
import sys

import pytest

if "triton" in sys.modules:
    import triton

    if not triton.knobs.runtime.interpret and "vllm" in sys.modules:
        raise pytest.UsageError(
            "tests/kernels needs a process that has not imported triton yet: run it alone or first."
        )

_WHILE_IMPORTING = {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
_before = {name: os.environ.get(name) for name in _WHILE_IMPORTING}
os.environ.update(_WHILE_IMPORTING)

pytest.importorskip("triton", reason="the CPU engine is not installed")
pytest.importorskip("vllm", reason="the CPU engine is not installed")

import triton.backends
from triton.backends import Backend

from specgram_lab.builders.cpu import interpreter
from specgram_lab.builders.cpu.triton_backend.compiler import InterpretedOnly
from specgram_lab.builders.cpu.triton_backend.driver import InterpreterDriver

triton.backends.backends["cpu"] = Backend(compiler=InterpretedOnly, driver=InterpreterDriver)
interpreter.install()

import vllm.v1.worker.cpu.shm  # noqa: F401  stream placeholders; must come before the V2 modules

from specgram_lab.builders.cpu import kernels

for _name in kernels.NATIVE:
    kernels.find(_name)

for _name, _value in _before.items():
    if _value is None:
        del os.environ[_name]
    else:
        os.environ[_name] = _value
