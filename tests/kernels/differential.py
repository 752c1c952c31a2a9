"""Run a launch twice, in the interpreter on copies and natively on the originals, and compare all memory."""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from specgram_lab.builders.cpu import kernels

FLOAT_TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
"""Sums of exponentials are added in another order than numpy adds them, and exp and log differ by an ulp."""


class Storages:
    """Copies of the storages behind tensors; tensors that share one keep sharing its copy."""

    def __init__(self) -> None:
        self.copies: dict[int, torch.UntypedStorage] = {}

    def copy(self, value: Any) -> Any:
        """The tensor over the copied storage; anything else unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        twin = self.copies.setdefault(storage.data_ptr(), storage.clone())
        return torch.empty(0, dtype=value.dtype).set_(twin, value.storage_offset(), value.size(), value.stride())


def assert_same(name: str, oracle: torch.Tensor, native: torch.Tensor) -> None:
    """Integers and masks equal, floats within FLOAT_TOLERANCE, NaN and infinities in the same places."""
    if oracle.dtype.is_floating_point:
        torch.testing.assert_close(
            native, oracle, equal_nan=True, msg=lambda text: f"{name}: {text}", **FLOAT_TOLERANCE
        )
    else:
        assert torch.equal(oracle, native), f"{name}: {oracle} (interpreter) != {native} (native)"


class Checked:
    """Stands in for a kernel: every launch is run both ways and compared."""

    def __init__(self, name: str, original: Any, native: Callable[..., None], launches: Counter[str]) -> None:
        self.name, self.original, self.native, self.launches = name, original, native, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            for option in ("num_warps", "num_stages"):
                kwargs.pop(option, None)
            storages = Storages()
            oracle_args = [storages.copy(value) for value in args]
            oracle_kwargs = {key: storages.copy(value) for key, value in kwargs.items()}
            with np.errstate(all="ignore"):
                self.original[grid](*oracle_args, **oracle_kwargs)
            self.native(grid, *args, **kwargs)
            self.launches[self.name] += 1
            pairs = [*zip(self.original.arg_names, args, oracle_args, strict=False)]
            pairs += [(key, value, oracle_kwargs[key]) for key, value in kwargs.items()]
            for parameter, value, oracle in pairs:
                if isinstance(value, torch.Tensor):
                    assert_same(f"{self.name}({parameter})", oracle, value)

        return launch


@contextmanager
def checked(module: str) -> Iterator[Counter[str]]:
    """Check every launch of the kernels of one vLLM module; gives the number of launches by kernel."""
    host, launches = importlib.import_module(module), Counter()
    originals = {
        name.rsplit(".", 1)[1]: function
        for name, function in kernels.NATIVE.items()
        if name.rsplit(".", 1)[0] == module
    }
    saved = {attribute: getattr(host, attribute) for attribute in originals}
    try:
        for attribute, function in originals.items():
            setattr(host, attribute, Checked(attribute, saved[attribute], function, launches))
        yield launches
    finally:
        for attribute, kernel in saved.items():
            setattr(host, attribute, kernel)


def check(name: str, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Check one launch of a kernel given by its full name."""
    kernel = kernels.find(name)
    Checked(name.rsplit(".", 1)[1], kernel, kernels.NATIVE[name], Counter())[grid](*args, **kwargs)
