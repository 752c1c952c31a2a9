"""Mends for Triton's interpreter, and a count of the kernels that ran in it.

Three faults of the interpreter (triton 3.9.0) stop vLLM's V2 kernels:

* masks made with ``&`` reach load and store as int8, which the C++ side refuses
  ("mask has unsupported dtype");
* ``tl.max(..., return_indices=True)`` and ``tl.argmax`` over a block of NaN raise
  "All-NaN slice encountered" instead of giving an index;
* functions of libdevice are compiled-only: sampling from drafts with temperature ends in
  ``'NoneType' object has no attribute 'dtype'`` at ``log1p``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

_launches: Counter[str] = Counter()
_installed = False


def interpreted_launches() -> dict[str, int]:
    """Kernels that the interpreter has run in this process, by full name, with their launch counts."""
    return dict(_launches)


def reset_launches() -> None:
    """Forget the launches counted so far (an engine's start-up is not part of a measurement)."""
    _launches.clear()


def install() -> None:
    """Apply the mends and start counting; a second call does nothing."""
    global _installed
    if _installed:
        return
    from triton.runtime import interpreter

    _accept_integer_masks(interpreter)
    _survive_all_nan_blocks(interpreter)
    _interpret_libdevice(interpreter)
    _count_launches(interpreter)
    _installed = True


def _accept_integer_masks(interpreter: Any) -> None:
    """Cast masks to bool before they reach the C++ load and store."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        if mask.data.dtype == np.bool_:
            return mask
        # A negative int8 (`~` of a mask) is true in its lowest bit only where the mask is true.
        return interpreter.TensorHandle((mask.data & 1).astype(np.bool_), mask.dtype)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        return load(self, ptrs, as_bool(mask), *rest, **options)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        return store(self, ptrs, value, as_bool(mask), *rest, **options)

    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store


def _survive_all_nan_blocks(interpreter: Any) -> None:
    """Give NaN and index 0 where a reduced block holds nothing else."""
    original = interpreter.ReduceOps.min_max

    def min_max(self: Any, operand: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        def index(data: Any, **options: Any) -> Any:
            filled = np.where(np.isnan(data), np.inf if idx_reduce_op is np.nanargmin else -np.inf, data)
            plain = np.argmin if idx_reduce_op is np.nanargmin else np.argmax
            return plain(filled, **options)

        first = operand[0] if isinstance(operand, tuple) else operand
        if idx_reduce_op is None or not np.issubdtype(first.handle.data.dtype, np.floating):
            return original(self, operand, val_reduce_op, idx_reduce_op)
        return original(self, operand, val_reduce_op, index)

    interpreter.ReduceOps.min_max = min_max


def _interpret_libdevice(interpreter: Any) -> None:
    """Compute the libdevice functions that vLLM's V2 kernels call with numpy."""
    import triton.language as tl
    from triton.language.extra import libdevice

    def log1p(operand: Any, **options: Any) -> Any:
        data = np.log1p(operand.handle.data)
        return tl.core.tensor(interpreter.TensorHandle(data, operand.dtype.scalar), operand.type)

    def isnan(operand: Any, **options: Any) -> Any:
        data = np.isnan(operand.handle.data).astype(np.int32)
        shape = operand.type.shape if operand.type.is_block() else None
        kind = tl.int32 if shape is None else tl.block_type(tl.int32, list(shape))
        return tl.core.tensor(interpreter.TensorHandle(data, tl.int32), kind)

    libdevice.log1p = log1p
    libdevice.isnan = isnan


def _count_launches(interpreter: Any) -> None:
    """Count every grid that the interpreter executes."""
    executor = interpreter.GridExecutor
    call = executor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _launches[f"{self.fn.__module__}.{self.fn.__qualname__}"] += 1
        return call(self, *args, **kwargs)

    executor.__call__ = counted
