"""Rows of the grammar's mask as this process's vLLM fills them; its arguments are kinds of drafts, such as ``vv--``.

A model-free engine takes a request up to its first decode step; then vLLM's own structured-output manager is asked for
the mask of each kind of draft (see ``data/mask_rows.yaml``). The last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from specgram_lab import scenarios
from specgram_lab.builders import local
from specgram_lab.builders.scripted import STAGE, one_token

SCENARIO = "row-a"
PADDED = -1


def main(kinds: list[str]) -> None:
    """Print the rows of each kind of draft."""
    with local.quick_start():
        llm = local.build(scenarios.cell(SCENARIO, "sync", record=False))
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    scenario = scenarios.load_scenario(SCENARIO)
    STAGE.set(scenario, tokenizer)
    engine.add_request("0", {"prompt_token_ids": tokenizer("x").input_ids}, _parameters(scenario))
    scheduler = engine.engine_core.engine_core.scheduler
    while not next(iter(scheduler.requests.values())).num_output_tokens:
        engine.step()
    request = next(iter(scheduler.requests.values()))
    tokens = {"v": one_token(tokenizer, " two"), "x": one_token(tokenizer, "!"), "-": PADDED}
    found = {}
    for kind in kinds:
        found[kind] = _rows(scheduler.structured_output_manager, request, [tokens[letter] for letter in kind])
    print(json.dumps(found), flush=True)
    os._exit(0)


def _parameters(scenario: scenarios.Scenario) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = StructuredOutputsParams(regex=scenario.requests[0].grammar.value)
    return SamplingParams(temperature=0, max_tokens=16, structured_outputs=asked)


def _rows(manager: Any, request: Any, drafts: list[int]) -> str:
    number = request.request_id
    try:
        mask = manager.grammar_bitmask({number: request}, [number], {number: drafts})
    except AssertionError as error:
        request.structured_output_request.grammar.reset()
        return type(error).__name__
    letters = ["U" if (row == -1).all() else "C" for row in mask]
    return "".join(letter if place <= len(drafts) else "." for place, letter in enumerate(letters))


if __name__ == "__main__":
    main(sys.argv[1:])
