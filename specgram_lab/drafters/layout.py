"""Checkpoints as stock vLLM 0.32 and 0.33 load them: config.json and one model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specgram_lab.drafters.blocks import Shape


def plain(module: nn.Module, *parts: str) -> dict[str, Tensor]:
    """The weights of the named children under their own names."""
    state = module.state_dict()
    return {name: value for name, value in state.items() if name.split(".")[0] in parts}


def write(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write the checkpoint; weights become bfloat16, whole numbers stay what they are."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: value.detach().to(torch.bfloat16 if value.is_floating_point() else value.dtype)
        for name, value in weights.items()
    }
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint by name, floating-point ones in float32."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    return {name: value.float() if value.is_floating_point() else value for name, value in stored.items()}


def _common(shape: Shape, layers: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": vocabulary,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }


def llama_config(shape: Shape, layers: int, vocabulary: int) -> dict[str, Any]:
    """A Llama whose head is its embedding."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "mlp_bias": False,
        **_common(shape, layers, vocabulary),
    }


def block_config(
    architecture: str, shape: Shape, layers: int, vocabulary: int, taps: tuple[int, ...], mask: int, **own: Any
) -> dict[str, Any]:
    """A drafter of blocks that reads the outputs of the target's layers ``taps``, counted from 0; ``own`` is what its
    kind asks for beside that, in ``dflash_config``."""
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        **_common(shape, layers, vocabulary),
        "dflash_config": {
            "target_layer_ids": list(taps), "mask_token_id": mask, "use_aux_hidden_state": True, **own,
        },
    }  # fmt: skip


def dspark_config(
    shape: Shape, layers: int, vocabulary: int, taps: tuple[int, ...], rank: int, mask: int, block: int
) -> dict[str, Any]:
    """A dense DSpark drafter that drafts ``block`` tokens and has both heads."""
    return {
        **block_config("Qwen3DSparkModel", shape, layers, vocabulary, taps, mask),
        "block_size": block,
        "target_layer_ids": list(taps),
        "mask_token_id": mask,
        "markov_rank": rank,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def eagle3_config(shape: Shape, vocabulary: int, aux_layers: tuple[int, ...]) -> dict[str, Any]:
    """An EAGLE-3 drafter. It counts the states that enter a layer: one more than the layer that gave them."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "mlp_bias": False,
        **_common(shape, 1, vocabulary),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in aux_layers],
        "num_aux_hidden_states": len(aux_layers),
    }
