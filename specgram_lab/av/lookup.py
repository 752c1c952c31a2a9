"""What V2's n-gram drafter proposes after a text, and the confidence that the patch ``av-ngram`` ranks it by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_PRIME = 65521


def confidence(total: Ints, length: Ints) -> npt.NDArray[np.float32]:
    """A number in [0.5, 0.75) for a text of ``length`` tokens whose ids add up to ``total``.

    The same for every position of a draft, so that survival, its power, falls with depth. An n-gram drafter knows no
    probability; texts differ in this number only so that the same drafts win whenever a run is repeated.
    """
    mixed = (total * 7919 + length * 104729) % _PRIME
    return (0.5 + 0.25 * mixed / _PRIME).astype(np.float32)


def propose(tokens: Sequence[int] | Ints, lengths: Sequence[int], k: int, low: int, high: int) -> Ints:
    """Drafts of ``k`` tokens after each of the prefixes ``tokens[:length]``, of shape (len(lengths), k).

    The longest n-gram of ``low`` to ``high`` tokens that ends the prefix and occurred before, at its last occurrence;
    what follows it there is proposed. Places that it does not fill hold the prefix' last token, also where nothing
    matched (`NgramGPUSpeculator`, vLLM 0.32).
    """
    text = np.asarray(tokens, dtype=np.int64)
    drafts = np.empty((len(lengths), k), dtype=np.int64)
    for row, length in enumerate(lengths):
        drafts[row] = text[length - 1]
        start = _after_match(text[:length], low, high)
        if start is not None:
            found = text[start : min(start + k, length)]
            drafts[row, : len(found)] = found
    return drafts


def _after_match(prefix: Ints, low: int, high: int) -> int | None:
    """Where the continuation of the last earlier occurrence of the longest matching suffix begins."""
    length = len(prefix)
    ends = np.flatnonzero(prefix[: length - 1] == prefix[-1])  # where an n-gram with the same last token ends
    best = None
    for size in range(1, min(high, length - 1) + 1):
        ends = ends[ends >= size - 1]
        ends = ends[prefix[ends - (size - 1)] == prefix[length - size]]
        if not len(ends):
            break
        if size >= low:
            best = int(ends[-1]) + 1
    return best
