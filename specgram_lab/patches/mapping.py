"""The patch ``pre-52436-mapping``: rows of the grammar's mask counted from the logits that AV left (vllm#52436).

With a budget of zero these are fewer than the rows that the scheduler sent, and the worker's assertion fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgram_lab.patches.registry import Patch, Replacements


def count_what_is_left(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Leave the scheduled layout out of account, as before the fix."""
    from specgram_lab.samplers import hooks

    hooks.prepare_v2()
    from vllm.v1.worker.gpu import structured_outputs

    def mapping(
        req_ids: list[str], grammar_req_ids: list[str], offsets: Any, drafts: Any, bonus: int, stride: int
    ) -> Any:
        return original(req_ids, grammar_req_ids, offsets, None, bonus, stride)

    original = changes.set(structured_outputs, "_build_grammar_mapping", mapping)


PATCHES = {
    "pre-52436-mapping": Patch(
        "pre-52436-mapping",
        "the fault of vllm#52436 put back: a draft budget of zero ends the engine",
        ("vllm.v1.worker.gpu.structured_outputs:_build_grammar_mapping",),
        count_what_is_left,
        releases=("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
        elsewhere="0.33.0 has no such mapping, every request owns k + 1 rows of the mask (the layout of vllm#52477)",
    )
}
