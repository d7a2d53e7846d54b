"""Tiny random instances of the families that only transformers computes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB, WINDOW = 97, 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXED = ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2-moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 8}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED, "tie_word_embeddings": False},
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "head_dim": 8,
            "tie_word_embeddings": False,
            "global_head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": [*_MIXED[:5], "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 4,
        },
    ),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED, "rope_scaling": None},
    ),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": _MIXED}),
    "granite": ("Granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "deepseek-v2": ("DeepseekV2", _LATENT),
    "deepseek-v3": ("DeepseekV3", _LATENT),
    "gpt2": ("GPT2", {"n_positions": 128}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "stablelm": (
        "StableLm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 48, "tie_word_embeddings": False}),
}
FAMILIES = tuple(_FAMILIES)
_SEEDS = {"gemma2": 8, "olmo2": 1, "gpt-neox": 2, "falcon": 3, "starcoder2": 2, "gpt2": 1}
"""Seeds with a lively greedy text, where the default has none."""


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> transformers.PreTrainedModel:
    """A 7-layer random model in eval mode; weights scaled so that its greedy text varies."""
    name, extra = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(_COMMON | extra | changes))
    torch.manual_seed(_SEEDS.get(family, 7))
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            elif key.endswith("bias"):
                parameter.normal_(std=0.1)
            else:
                parameter.uniform_(0.5, 1.5)
    return model
