"""A DSpark drafter with random weights for SmolLM2: its drafts are wrong and its confidences arbitrary, but it runs."""

from __future__ import annotations

import json
from pathlib import Path


def dspark(target: Path, out: Path) -> None:
    """Write config and weights (one layer, always the same) to ``out``."""
    import torch
    from safetensors.torch import save_file

    base = json.loads((target / "config.json").read_text(encoding="utf-8"))
    hidden, inner, vocab = base["hidden_size"], base["intermediate_size"], base["vocab_size"]
    heads, kv_heads, head_dim = base["num_attention_heads"], base["num_key_value_heads"], base["head_dim"]
    layers, rank = [2, 15, 27], 64
    seeded = torch.Generator().manual_seed(0)

    def rand(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return (torch.randn(*shape, generator=seeded) * scale).to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    layer = "layers.0."
    weights = {
        f"{layer}self_attn.q_proj.weight": rand(heads * head_dim, hidden),
        f"{layer}self_attn.k_proj.weight": rand(kv_heads * head_dim, hidden),
        f"{layer}self_attn.v_proj.weight": rand(kv_heads * head_dim, hidden),
        f"{layer}self_attn.o_proj.weight": rand(hidden, heads * head_dim),
        f"{layer}self_attn.q_norm.weight": ones(head_dim),
        f"{layer}self_attn.k_norm.weight": ones(head_dim),
        f"{layer}mlp.gate_proj.weight": rand(inner, hidden),
        f"{layer}mlp.up_proj.weight": rand(inner, hidden),
        f"{layer}mlp.down_proj.weight": rand(hidden, inner),
        f"{layer}input_layernorm.weight": ones(hidden),
        f"{layer}post_attention_layernorm.weight": ones(hidden),
        "norm.weight": ones(hidden),
        "hidden_norm.weight": ones(hidden),
        "fc.weight": rand(hidden, hidden * len(layers)),
        "markov_head.markov_w1.weight": rand(vocab, rank),
        "markov_head.markov_w2.weight": rand(vocab, rank),
        "confidence_head.proj.weight": rand(1, hidden + rank, scale=0.05),
        "confidence_head.proj.bias": torch.zeros(1, dtype=torch.bfloat16),
    }
    block = {"target_layer_ids": layers, "mask_token_id": 0, "use_aux_hidden_state": True, "block_size": 8}
    config = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0, "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "num_target_layers": base["num_hidden_layers"], "markov_rank": rank, "enable_confidence_head": True,
        "confidence_head_with_markov": True, "dflash_config": block, **block,
    }  # fmt: skip
    out.mkdir(parents=True)
    save_file(weights, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
