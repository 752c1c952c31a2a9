"""GGUF to a bf16 folder of safetensors: ``python -m specgram_lab.builders.convert FILE.gguf FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, folder: Path) -> None:
    """Read the weights and the tokenizer out of ``source`` and write them as vLLM loads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = str(source.parent)
    # dequantize: otherwise transformers keeps the blocks packed, and refuses to save them
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=unpacked
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
