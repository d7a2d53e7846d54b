"""Tiny random models whose greedy text is varied, and the slow loop they are checked with."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from aquiline.drafters.eagle_network import DraftHead, HeadConfig, build_network
from aquiline.sampling import SamplingParams, TokenChooser
from aquiline.targets.decoder import Decoder, config_from_hf, load_state
from aquiline.targets.layers import LayerConfig
from aquiline.targets.rope import RopeConfig

VOCAB = 97

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-bias-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 12, "head_dim": 12}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 3}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0}),
}
FAMILIES = tuple(_FAMILIES)


@cache
@torch.inference_mode(False)  # what is cached must serve every test
def hf_model(family: str, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    """A 7-layer random model of a family; weights scaled so that 64 greedy tokens vary."""
    name, extra = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        **extra,
    )
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


@cache
@torch.inference_mode(False)  # what is cached must serve every test
def decoder(family: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """Our decoder with the weights of `hf_model`."""
    model = hf_model(family, dtype)
    result = Decoder(config_from_hf(model.config.to_dict())).to(dtype).eval()
    load_state(result, model.state_dict(), family)
    return result.requires_grad_(False)


def head(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> DraftHead:
    """A random head for the tiny targets; an EAGLE-3 head drafts every second token."""
    layer = LayerConfig(48, 64, 4, 2, 12, 1e-6, RopeConfig(10000.0, 12))
    settings: dict[str, Any] = {
        "kind": kind,
        "layer": layer,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB if kind == "eagle" else (VOCAB + 1) // 2,
        "target_hidden_size": 48,
        "features": ("final",) if kind == "eagle" else (2, 3, 4),
    }
    config = HeadConfig(**(settings | changes))
    torch.manual_seed(seed)
    network = build_network(config).to(dtype).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    ids = None if config.draft_vocab_size == VOCAB else torch.arange(0, VOCAB, 2)
    return DraftHead(network, ids)


def prompts(count: int, *, seed: int = 0, longest: int = 20) -> list[list[int]]:
    """`count` random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def chooser(prompt: list[int], params: SamplingParams | None = None, seed: int = 0) -> TokenChooser:
    """A chooser for a bare loop."""
    return TokenChooser(params or SamplingParams(), seed, len(prompt))
