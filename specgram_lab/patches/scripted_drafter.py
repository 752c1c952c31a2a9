"""The patch ``scripted-drafter``: a scenario's drafts in the place of a real drafter's, on the real Model Runner V2.

The target is its own draft model and really proposes, so that its confidences rank the drafts for adaptive
verification; then its tokens are overwritten. What the target says comes from the target: `Stage.set` is given the
greedy output of an earlier pass, in which nothing was overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgram_lab.patches.registry import Patch, Replacements

_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator"


def play_drafts(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Overwrite what the standalone draft model proposes; a draft that the scenario lacks stays the model's own."""
    from specgram_lab.builders.scripted import STAGE
    from specgram_lab.samplers import hooks

    hooks.prepare_v2()
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    def propose(self: Any, batch: Any, metadata: Any, slots: Any, hidden: Any, aux: Any, *args: Any, **kw: Any) -> Any:
        tokens = original(self, batch, metadata, slots, hidden, aux, *args, **kw)
        if kw.get("dummy_run") or not STAGE.scripts:
            return tokens
        # the first of `args` is how many tokens each request was given
        for row, (request_id, sampled) in enumerate(zip(batch.req_ids, args[0].tolist(), strict=False)):
            script = STAGE.script_of(request_id)
            if script is not None and sampled:
                draft = script.advance(sampled)
                tokens[row, : len(draft)] = tokens.new_tensor(draft)
        return tokens

    original = changes.set(StandaloneARSpeculator, "propose", propose)


PATCHES = {
    "scripted-drafter": Patch(
        "scripted-drafter",
        "a scenario's drafts in a real engine",
        (f"{_SPECULATOR}.propose",),
        play_drafts,
    )
}
