"""Writes config.json of EAGLE-3 heads as vllm-project/speculators reads it."""

from __future__ import annotations

from typing import Any

from aquiline.checkpoints.eagle.config_kinds import NORM_FLAGS
from aquiline.checkpoints.eagle.safeailab import layer_keys
from aquiline.checkpoints.eagle.stored import StoredHead


def speculators_config(stored: StoredHead, target_name: str, draft_tokens: int) -> dict[str, Any]:
    """Returns config.json; every switch is explicit, because the defaults of readers differ.

    Args:
        stored: an EAGLE-3 head.
        target_name: hub id or folder from which servers load the target.
        draft_tokens: default number of drafts a step.
    """
    config = stored.config
    other_width = config.target_hidden_size != config.hidden_size
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if other_width else None,
        "eagle_aux_hidden_state_layer_ids": list(config.features),
        **{flag: getattr(config, flag) for flag in NORM_FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "bias": False,
        "torch_dtype": str(stored.dtype).removeprefix("torch."),
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], "mlp_bias": False, **layer_keys(config)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
    }
