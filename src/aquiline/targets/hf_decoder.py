"""Runs a transformers model's parameters in our own decoder, if that computes the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aquiline.targets.decoder import FAMILIES, Decoder, config_from_hf
from aquiline.targets.target import TargetInput

PROBE_TOKENS = 6
"""Tokens of the longest sequence that a probe runs."""


def probe_ids(vocab_size: int, device: torch.device) -> Tensor:
    """(PROBE_TOKENS,) int64 token ids, spread over the vocabulary."""
    return torch.arange(1, PROBE_TOKENS + 1, device=device) * vocab_size // (PROBE_TOKENS + 2)


def difference(got: Tensor, expected: Tensor) -> float:
    """Returns the distance of two logit vectors, relative to the spread of the expected one."""
    got, expected = got.cpu().double(), expected.cpu().double()  # MPS has no float64.
    spread = (expected - expected.mean()).norm()
    return float((got - expected).norm() / spread.clamp(min=1e-30))


def tolerance(dtype: torch.dtype, half: float) -> float:
    """Returns the largest acceptable `difference` for a dtype; `half` applies to 16-bit dtypes."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else half


def shared_decoder(model: Any) -> Decoder | None:
    """Returns our decoder with the parameters of `model`, or None if the model is modified or unsupported."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "model_type", None) not in FAMILIES or not _is_stock(model):
        return None
    try:
        own = config_from_hf(config.to_dict())
    except ValueError:
        return None  # The adapter handles settings that our decoder does not support.
    with torch.device("meta"):
        decoder = Decoder(own)
    state = {name.removeprefix("model."): tensor.detach() for name, tensor in model.state_dict().items()}
    expected = {name: parameter.shape for name, parameter in decoder.state_dict().items()}
    if expected != {name: tensor.shape for name, tensor in state.items()}:
        return None
    decoder.load_state_dict(state, assign=True)
    if own.tied:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    decoder.eval().requires_grad_(False)
    return decoder if _agrees(decoder, model) else None


def _is_stock(model: Any) -> bool:
    """True for an unmodified transformers model: no adapters, quantisation, hooks or patches."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model.config.model_type) != type(model).__name__ or model.training:
        return False
    plain = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
    for module in model.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        own_hooks = all(hook.__module__ == "transformers.utils.output_capturing" for hook in hooks)
        if not type(module).__module__.startswith(plain) or "forward" in vars(module) or not own_hooks:
            return False
    parameters = list(model.parameters())
    return len({(p.dtype, p.device) for p in parameters}) == 1 and parameters[0].dtype.is_floating_point


@torch.no_grad()
def _agrees(decoder: Decoder, model: nn.Module) -> bool:
    ids = probe_ids(decoder.shape.vocab_size, decoder.device)[None]
    positions = torch.arange(PROBE_TOKENS, device=decoder.device)[None]
    own = decoder(TargetInput(ids, positions, None, decoder.new_cache(1, PROBE_TOKENS), [0])).logits
    return difference(own, model(input_ids=ids, use_cache=False).logits) <= tolerance(decoder.dtype, 0.15)
