"""The driver half of the ``cpu`` Triton backend: active only where the interpreter is all there is."""

from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


def _gpu_driver_is_active() -> bool:
    """Whether one of Triton's in-tree GPU drivers reports itself active.

    Asked late, through the finished table of backends: this module is imported while Triton is still
    filling it.
    """
    from triton.backends import backends

    return any(name != "cpu" and backend.driver.is_active() for name, backend in backends.items())


class InterpreterDriver(DriverBase):
    """Enough of a driver for Triton's and vLLM's checks; no kernel is ever launched through it."""

    def __init__(self) -> None:
        """Hold nothing: there is no device."""

    @classmethod
    def is_active(cls) -> bool:
        """True only with ``TRITON_INTERPRET=1`` and no active GPU driver."""
        return bool(knobs.runtime.interpret) and not _gpu_driver_is_active()

    def get_current_target(self) -> GPUTarget:
        """Name the target; the numbers are placeholders that nothing reads."""
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> Any:
        """The torch device kernels run on."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """The torch module that stands in for ``torch.cuda``."""
        import torch

        return torch.cpu

    def get_current_device(self) -> int:
        """Device index, always 0."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Ignore: there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        """Stream handle, always 0: the interpreter is synchronous."""
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Refuse: only a launcher compiled in C++ needs it."""
        raise NotImplementedError("The cpu backend of specgram_lab builds no kernel launcher.")

    def get_benchmarker(self) -> Any:
        """Refuse: Triton's autotuner has nothing to tune in an interpreter."""
        raise NotImplementedError("The cpu backend of specgram_lab cannot autotune Triton kernels.")

    def get_empty_cache_for_benchmark(self) -> Any:
        """A buffer for Triton's benchmarker to overwrite between runs."""
        import torch

        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None:
        """Ignore: see :meth:`get_empty_cache_for_benchmark`."""
