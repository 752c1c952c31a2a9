# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""The random functions of vLLM's V2 kernels, bit for bit: murmur3 noise and Triton's Philox.

Scalars are machine types inside compiled code (uint32, float32), which no Python annotation names: Any.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from specgram_lab.builders.cpu.kernels.numeric import bits_of

DRAFT_NOISE_SALT = 1 << 30
"""Added to a position while drafting, so that a draft and its verification draw different noise."""

_LOW = np.int64(0xFFFFFFFF)


@numba.njit(inline="always")
def _mix(h: Any, key: Any) -> Any:
    """One murmur3 round; numba widens uint32 products, hence the casts."""
    key = np.uint32(key * np.uint32(0xCC9E2D51))
    key = np.uint32((key << np.uint32(15)) | (key >> np.uint32(17)))
    key = np.uint32(key * np.uint32(0x1B873593))
    h = np.uint32(h ^ key)
    h = np.uint32((h << np.uint32(13)) | (h >> np.uint32(19)))
    return np.uint32(h * np.uint32(5) + np.uint32(0xE6546B64))


@numba.njit(inline="always")
def murmur_prefix(seed: Any, pos: Any, domain: Any) -> Any:
    """The part of the hash that a request's seed and position fix for all tokens."""
    seed, pos = np.int64(seed), np.int64(pos)
    h = _mix(np.uint32(domain), np.uint32(seed & _LOW))
    h = _mix(h, np.uint32((seed >> np.int64(32)) & _LOW))
    return _mix(h, np.uint32(pos & _LOW))


@numba.njit(inline="always")
def murmur_hash(prefix: Any, offset: Any) -> Any:
    """Finish the hash for one token id."""
    h = np.uint32(_mix(prefix, np.uint32(offset)) ^ np.uint32(16))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(0x85EBCA6B))
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@numba.njit(inline="always")
def uniform32(hashed: Any) -> Any:
    """A float32 in (0, 1) from all 32 bits; the halves are converted apart, as the kernel does."""
    high = np.float32(np.int32(hashed >> np.uint32(16)))
    low = np.float32(np.int32(hashed & np.uint32(0xFFFF)))
    return high * np.float32(1.52587890625e-05) + (low + np.float32(0.5)) * np.float32(2.3283064365386963e-10)


@numba.njit(inline="always")
def uniform64(low: Any, high: Any) -> Any:
    """A float64 in (0, 1) from 53 of the 64 bits of two hashes."""
    bits = ((np.uint64(high) << np.uint64(32)) | np.uint64(low)) >> np.uint64(11)
    uniform = (np.float64(np.int64(bits)) + 0.5) * 1.1102230246251565e-16
    return uniform - 1.1102230246251565e-16 if uniform == 1.0 else uniform


@numba.njit(inline="always")
def log1p_negative(value: Any) -> Any:
    """log(1 - value) in float32 as the kernel computes it: a series below 0.25, a logarithm above."""
    if value < np.float32(0.25):
        y = np.float32(1.0 / 8.0)
        y = np.float32(1.0 / 7.0) + value * y
        y = np.float32(1.0 / 6.0) + value * y
        y = np.float32(1.0 / 5.0) + value * y
        y = np.float32(1.0 / 4.0) + value * y
        y = np.float32(1.0 / 3.0) + value * y
        y = np.float32(1.0 / 2.0) + value * y
        y = np.float32(1.0) + value * y
        return -value * y
    return np.log(max(np.float32(1.0) - value, np.float32(5.960464477539063e-08)))


@numba.njit(inline="always")
def gumbel32(hashed: Any) -> Any:
    """Gumbel noise of one hash in float32."""
    return -np.log(-log1p_negative(uniform32(hashed)))


GUMBEL32_LIMIT = np.float32(22.9)
"""No hash gives more noise: the smallest uniform is 2**-33 and -log(2**-33) = 22.874."""


@numba.njit(inline="always")
def gumbel32_bound(hashed: Any) -> Any:
    """A cheap upper bound of :func:`gumbel32`: -log(u) with u rounded down to a power of two.

    The exponent of float32(hash) is read instead of a logarithm. float32 rounds up at most to the next
    power of two, so one factor of two more is granted.
    """
    exponent = (bits_of(np.float32(np.int64(hashed) + np.int64(1))) >> np.int32(23)) - np.int32(127)
    return np.float32(np.int32(34) - exponent) * np.float32(0.6931473)


@numba.njit(inline="always")
def philox_uniform(seed: Any, offset: Any) -> Any:
    """``tl.rand(seed, offset)`` for a 64-bit offset, kept above zero as vLLM's rejection kernel keeps it."""
    k0 = np.uint32(np.int64(seed) & _LOW)
    k1 = np.uint32((np.int64(seed) >> np.int64(32)) & _LOW)
    c0 = np.uint32(np.int64(offset) & _LOW)
    c1 = np.uint32((np.int64(offset) >> np.int64(32)) & _LOW)
    c2, c3 = np.uint32(0), np.uint32(0)
    for _ in range(10):
        product_b = np.uint64(0xCD9E8D57) * np.uint64(c2)
        product_a = np.uint64(0xD2511F53) * np.uint64(c0)
        c0 = np.uint32(np.uint32(product_b >> np.uint64(32)) ^ c1 ^ k0)
        c2 = np.uint32(np.uint32(product_a >> np.uint64(32)) ^ c3 ^ k1)
        c1 = np.uint32(product_b & np.uint64(0xFFFFFFFF))
        c3 = np.uint32(product_a & np.uint64(0xFFFFFFFF))
        k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
        k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
    signed = np.int32(c0)
    positive = ~signed if signed < 0 else signed
    return max(np.float32(positive) * np.float32(4.6566127342e-10), np.float32(4.6566127342e-10))
