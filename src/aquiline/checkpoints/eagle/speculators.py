"""config.json of EAGLE-3 heads as vllm-project/speculators reads them."""

from __future__ import annotations

from typing import Any

from aquiline.checkpoints.eagle.safeailab import FLAGS, rope_keys
from aquiline.checkpoints.eagle.stored import StoredHead


def speculators_config(stored: StoredHead, target_name: str, draft_tokens: int) -> dict[str, Any]:
    """Returns config.json; every switch is written out, because readers differ in their defaults.

    Args:
        stored: an EAGLE-3 head.
        target_name: the target, as its servers should load it.
        draft_tokens: drafts a step that servers use unless told otherwise.
    """
    config, layer = stored.config, stored.config.layer
    result: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == layer.hidden_size else config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.features),
        **{flag: getattr(config, flag) for flag in FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "bias": False,
        "torch_dtype": str(stored.dtype).removeprefix("torch."),
        "transformer_layer_config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": layer.activation,
            "hidden_size": layer.hidden_size,
            "intermediate_size": layer.intermediate_size,
            "num_attention_heads": layer.num_heads,
            "num_key_value_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim,
            "num_hidden_layers": config.num_layers,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": layer.rms_norm_eps,
            "tie_word_embeddings": False,
            "vocab_size": config.vocab_size,
            **rope_keys(layer.rope),
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
    }
    return result
