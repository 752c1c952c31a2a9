"""The compiler half of the ``cpu`` Triton backend: it compiles nothing."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpretedOnly(BaseBackend):
    """Satisfies Triton's backend discovery; every kernel runs in the interpreter or natively."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Only the target that :class:`..driver.InterpreterDriver` reports."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Identify the backend in Triton's caches (never written: nothing is compiled)."""
        return "specgram-lab-cpu-interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:
        """Refuse: reached only if a kernel is compiled although the interpreter is on."""
        raise NotImplementedError(_REFUSAL)

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        """Refuse: there are no compilation stages."""
        raise NotImplementedError(_REFUSAL)

    def load_dialects(self, context: Any) -> None:
        """Refuse: there are no MLIR dialects."""
        raise NotImplementedError(_REFUSAL)

    def get_module_map(self) -> dict[str, ModuleType]:
        """No device-specific modules."""
        return {}


_REFUSAL = "The cpu backend of specgram_lab cannot compile Triton kernels; run with TRITON_INTERPRET=1."
