"""Reads a target's embeddings, LM head and layer sizes for training.

Our own decoder shows its weights. Any other target is probed with every token and with unit vectors, which covers
whatever a model does around its matrices (Gemma's √H on embeddings, Cohere's and Granite's logit scale, quantised
weights).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.drafters.parallel import lm_head_rows
from aquiline.targets.decoder import Decoder
from aquiline.targets.layers import LayerConfig
from aquiline.targets.rope import RopeConfig
from aquiline.targets.target import Target
from aquiline.training.data.dataset import TrainingSet


@torch.no_grad()
def embedding_table(target: Target) -> Tensor:
    """(V, H) embeddings of all tokens, as `target.embed` returns them."""
    if isinstance(target, Decoder):
        return target.embed_tokens.weight.detach()
    return target.embed(torch.arange(target.shape.vocab_size, device=target.device))


@torch.no_grad()
def read_out_rows(target: Target, ids: Tensor | None) -> Tensor:
    """Rows of the matrix that turns "final" features into logits, in the target's dtype.

    Args:
        target: the target.
        ids: (Vd,) int64 tokens, or None for all.

    Returns:
        (Vd, H).

    Raises:
        ValueError: if the logits are not a linear function of the feature.
    """
    if isinstance(target, Decoder):
        weight = target.lm_head.weight.detach()
        return weight if ids is None else weight[ids.to(weight.device)].contiguous()
    every = torch.arange(target.shape.vocab_size, device=target.device)
    rows = lm_head_rows(target, every if ids is None else ids.to(target.device))
    if rows is None:
        raise ValueError(
            "this target's logits are not a linear function of its last feature (a soft-cap or a bias after the LM "
            "head), which the losses of draft heads assume; choose another target"
        )
    return rows


def draft_layer(target: Target) -> LayerConfig:
    """Sizes of a draft head's layer: the target's own where our decoder computes it, else a Llama layer as large.

    Raises:
        ValueError: for a target whose configuration is not known.
    """
    if isinstance(target, Decoder):
        return target.config.layer
    config = getattr(getattr(target, "model", None), "config", None)
    if config is None:
        raise ValueError(f"a {type(target).__name__} has no configuration to take a draft layer's sizes from")
    hidden, heads = target.shape.hidden_size, int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    inner = getattr(config, "intermediate_size", None)
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    return LayerConfig(
        hidden_size=hidden,
        intermediate_size=inner if isinstance(inner, int) else 4 * hidden,
        num_heads=heads,
        num_kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=head_dim - head_dim % 2,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        rope=RopeConfig(_theta(config), head_dim - head_dim % 2),
        activation=activation if activation == "gelu_pytorch_tanh" else "silu",
    )


def _theta(config: Any) -> float:
    """Base of the rotary frequencies of the layers that see everything."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def draft_vocabulary(sets: Iterable[TrainingSet], size: int, vocab_size: int) -> Tensor:
    """The most frequent assistant tokens, (size,) int64 in increasing order."""
    counted: Counter[int] = Counter()
    for data in sets:
        for example in data:
            counted.update(example.input_ids[example.loss_mask].tolist())
    common = [token for token, _ in counted.most_common(size)]
    if len(common) < size:  # little data: fill with the lowest ids, which are frequent pieces
        known = set(common)
        common += [t for t in range(vocab_size) if t not in known][: size - len(common)]
    return torch.tensor(sorted(common), dtype=torch.int64)


@torch.no_grad()
def copy_parameters(source: nn.Module, into: nn.Module) -> None:
    """Copies parameters one by one: reading the state dict of a gathered layer would shard it again."""
    for name, parameter in source.named_parameters():
        into.get_parameter(name).copy_(parameter)
