"""A model's logits in float32: ``python -m specgram_lab.drafters.logits MODEL``, questions in, answers out as JSON.

A question is ``{"chat": [...], "answer": [token, ...], "tokens": [token, ...]}``: the logits of ``tokens`` after that
much of an answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specgram_lab.handover import die_with_parent


def main(folder: Path) -> None:
    """Answer what stands on standard input."""
    die_with_parent()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", use_safetensors=True)
    found = []
    for asked in json.load(sys.stdin):
        ids = tokenizer.apply_chat_template(asked["chat"], add_generation_prompt=True, return_dict=False)
        with torch.inference_mode():
            last = model(torch.tensor([[*ids, *asked["answer"]]])).logits[0, -1]
        found.append(last[asked["tokens"]].tolist())
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
