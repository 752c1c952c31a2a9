"""A tokenizer in which unused marks of SmolLM2's bear the names that vLLM's parser for Qwen3 looks for.

The small target has no tokens that mean thinking. The parser is vLLM's own; only the names of four tokens, which no
prompt contains, are changed. The folder holds no weights: it is for the scripted engine.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

NAMES = {
    "<issue_start>": "<think>",
    "<issue_closed>": "</think>",
    "<jupyter_start>": "<tool_call>",
    "<jupyter_text>": "</tool_call>",
}
_TOKENIZER = "tokenizer.json"


def tokenizer_folder(target: Path) -> Path:
    """The folder beside ``target`` with its configuration and the renamed tokenizer; made on first use."""
    folder = target.with_name(f"{target.name}-qwen3-marks")
    if (folder / _TOKENIZER).is_file():
        return folder
    folder.mkdir(exist_ok=True)
    for path in target.glob("*"):
        if path.suffix in (".json", ".jinja") and path.name not in (_TOKENIZER, "manifest.json"):
            shutil.copy2(path, folder)
    content = json.loads((target / _TOKENIZER).read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        if token["content"] in NAMES:
            token |= {"content": NAMES[token["content"]], "special": False}  # as in Qwen3's tokenizer
    words = content["model"]["vocab"]
    content["model"]["vocab"] = {NAMES.get(word, word): number for word, number in words.items()}
    part = folder / f".{_TOKENIZER}.{os.getpid()}.tmp"
    part.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    part.replace(folder / _TOKENIZER)
    return folder
