# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Shared pieces of the native kernels: compilation, raw memory, and float tricks that vectorise.

A Triton kernel gets bare pointers and strides. The native kernels get the same: every tensor is handed to
numba as a flat array that starts at the tensor's first element, and is indexed with the strides that the
launch passes. One flat layout also means one compiled version per combination of element types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

NEGATIVE_INFINITY = np.float32(-np.inf)
LOWEST_KEY = np.int32(-2139095041)
"""Sort key of -inf, see :func:`float_key`."""


class Interpreted(Exception):
    """The native version does not cover this launch; the interpreter must run it."""


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with numba, cached on disk where some cache directory can be written."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function": read-only package and no NUMBA_CACHE_DIR
        return numba.njit(**options)(function)


def memory(tensor: torch.Tensor) -> np.ndarray:
    """The memory behind a tensor, flat, from its first to its last element.

    bfloat16 comes as uint16 (numba has no bfloat16; :func:`as_float` reads it), bool as uint8.
    Raises Interpreted for element types that no kernel here knows.
    """
    dtype = tensor.dtype
    if dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    elif dtype is torch.float16:
        raise Interpreted("float16 is not covered by the native kernels")
    if not tensor.is_contiguous():
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        tensor = tensor.as_strided((span if tensor.numel() else 0,), (1,))
    array = tensor.numpy()
    return array if array.ndim == 1 else array.reshape(-1)


def nothing(dtype: torch.dtype = torch.int32) -> np.ndarray:
    """Stand-in for an absent pointer, of an element type that is compiled anyway."""
    return _EMPTY[dtype]


_EMPTY = {
    dtype: memory(torch.empty(0, dtype=dtype))
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.float64)
}


@intrinsic
def _address_to_pointer(typingctx: Any, address: Any) -> Any:
    """Turn an integer address into a pointer that numba.carray accepts."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), codegen


@numba.njit(inline="always")
def int32_at(address: Any, size: Any) -> np.ndarray:
    """An int32 array of `size` elements at a raw address (vLLM keeps tables of block-table pointers)."""
    return numba.carray(_address_to_pointer(np.uint64(address)), (size,), np.int32)


@intrinsic
def bits_of(typingctx: Any, value: Any) -> Any:
    """Reinterpret a float32 as int32 (a scalar ``.view`` keeps LLVM from vectorising)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """Reinterpret an int32 as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


def as_float(value: Any) -> Any:
    """A stored element as float32; uint16 is bfloat16."""
    raise NotImplementedError("as_float exists only in compiled code")


@overload(as_float, inline="always", strict=False)
def _as_float(value: Any) -> Any:
    if value == types.uint16:
        return lambda value: float_of(np.int32(np.uint32(value) << np.uint32(16)))
    return lambda value: np.float32(value)


def stored_infinity(array: Any) -> Any:
    """-inf as `array` stores it."""
    raise NotImplementedError("stored_infinity exists only in compiled code")


@overload(stored_infinity, inline="always", strict=False)
def _stored_infinity(array: Any) -> Any:
    if array.dtype == types.uint16:
        return lambda array: np.uint16(0xFF80)
    return lambda array: np.float32(-np.inf)


@numba.njit(inline="always")
def float_key(value: Any) -> Any:
    """An int32 that orders like the float32: NaN below everything, -0.0 equal to 0.0.

    Integer maxima vectorise without assumptions on NaN; float maxima do not.
    """
    bits = bits_of(value)
    key = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
    key = np.int32(0) if key == np.int32(-1) else key
    return LOWEST_KEY if key > np.int32(0x7F800000) else max(key, LOWEST_KEY)


@numba.njit(inline="always")
def key_float(key: Any) -> Any:
    """The float32 that :func:`float_key` mapped to `key`."""
    return float_of(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@jit
def block_argmax(row: np.ndarray, start: Any, stop: Any) -> tuple[Any, Any]:
    """Largest element of ``row[start:stop]`` and its first index from `start`; NaN counts as -inf."""
    best, where = LOWEST_KEY, start
    for base in range(start, stop, 512):
        end = min(base + 512, stop)
        chunk = LOWEST_KEY
        for i in range(base, end):
            chunk = max(chunk, float_key(as_float(row[i])))
        if chunk > best:
            best, where = chunk, base
    for i in range(where, min(where + 512, stop)):
        if float_key(as_float(row[i])) == best:
            return key_float(best), i - start
    return key_float(best), 0


@numba.njit(inline="always")
def exp32(x: Any) -> Any:
    """exp in float32, within 2 ulp, without a library call so that loops vectorise; exp(-inf) = 0.

    Range reduction by ln 2 in two parts and a degree-6 polynomial (the classic Cephes scheme).
    """
    low = x < np.float32(-87.0)
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.float32(np.int32(x * np.float32(1.44269504) + (np.float32(0.5) if x >= 0 else np.float32(-0.5))))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    scale = float_of((np.int32(n) + np.int32(127)) << np.int32(23))
    return np.float32(0.0) if low else y * scale


@jit
def max_and_sumexp(row: np.ndarray, start: Any, stop: Any, divisor: Any) -> tuple[Any, Any]:
    """Maximum of ``row[start:stop] / divisor`` and the sum of exp(element - maximum), both float32.

    An all -inf stretch gives (-inf, 0).
    """
    best = LOWEST_KEY
    for i in range(start, stop):
        best = max(best, float_key(as_float(row[i]) / divisor))
    maximum = key_float(best)
    if maximum == NEGATIVE_INFINITY:
        return maximum, np.float32(0.0)
    # Sixteen partial sums: float addition must not be reordered, so the lanes are spelled out.
    lanes = np.zeros(16, np.float32)
    whole = start + (stop - start) // 16 * 16
    for base in range(start, whole, 16):
        for lane in range(16):
            lanes[lane] += exp32(as_float(row[base + lane]) / divisor - maximum)
    total = np.float64(0.0)
    for lane in range(16):
        total += lanes[lane]
    for i in range(whole, stop):
        total += exp32(as_float(row[i]) / divisor - maximum)
    return maximum, np.float32(total)
