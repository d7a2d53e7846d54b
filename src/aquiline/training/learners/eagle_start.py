"""Initialises new EAGLE heads from the target's last layer, or by a least-squares fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from aquiline.drafters.eagle_network import (
    DraftHead,
    Eagle3Layer,
    Eagle3Network,
    EagleNetwork,
    HeadConfig,
    Network,
    build_network,
)
from aquiline.targets.decoder import Decoder
from aquiline.targets.layers import DecoderLayer, decoder_layers
from aquiline.targets.target import Feature, Target, eagle3_layers
from aquiline.training.data.dataset import TrainingSet
from aquiline.training.learners.target_parts import copy_parameters, draft_layer, draft_vocabulary, read_out_rows
from aquiline.training.processes import whole
from aquiline.training.settings import TrainSettings


def new_head(
    settings: TrainSettings,
    target: Target,
    sets: Iterable[TrainingSet],
    build: Callable[[HeadConfig], Network] = build_network,
) -> DraftHead:
    """Makes an untrained head: random, or as close to the target as its shape allows.

    EAGLE-3 copies the target's last layer (q, k and v on the feature half of their input) and rows of its LM head, and
    passes the last feature through. If only transformers computes the target, the layer begins at zero and features are
    normed, or Gemma's entries of a hundred thousand would drown its output. EAGLE-1 begins as the identity on the
    feature: its layer lacks the first norm, so the target's weights would give a loss in the thousands.

    Args:
        settings: of the run.
        target: the target.
        sets: training sets, for the draft vocabulary.
        build: makes the network.
    """
    shape, eagle3 = target.shape, settings.kind == "eagle3"
    layers: tuple[Feature, ...] = (settings.layers or eagle3_layers(shape.num_layers)) if eagle3 else ("final",)
    size = settings.vocabulary_size(shape.vocab_size)
    vocabulary = draft_vocabulary(sets, size, shape.vocab_size) if eagle3 and size < shape.vocab_size else None
    config = HeadConfig(
        kind=settings.kind,
        layer=draft_layer(target),
        vocab_size=shape.vocab_size,
        draft_vocab_size=size if eagle3 else shape.vocab_size,
        target_hidden_size=shape.hidden_size,
        features=layers,
        max_positions=shape.max_positions,
        fc_norm=eagle3 and not isinstance(target, Decoder),
    )
    torch.manual_seed(settings.seed)
    network = build(config)
    if settings.start == "target" and isinstance(network, Eagle3Network):
        _start_eagle3(network, target, vocabulary)
    elif settings.start == "target" and isinstance(network, EagleNetwork):
        _start_eagle(network)
    return DraftHead(network, vocabulary)


@torch.no_grad()
def _start_eagle3(network: Eagle3Network, target: Target, vocabulary: Tensor | None) -> None:
    hidden = network.config.hidden_size
    network.fc.weight.mul_(0.1)
    network.fc.weight[:, -hidden:] += torch.eye(hidden)
    network.lm_head.weight.copy_(read_out_rows(target, vocabulary))
    layer = network.midlayer
    if not isinstance(target, Decoder):
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        return
    last = decoder_layers(target.layers)[-1]
    with whole(last):
        _copy_layer(layer, last, hidden)
    network.norm.load_state_dict(target.norm.state_dict())


def _copy_layer(layer: Eagle3Layer, last: DecoderLayer, hidden: int) -> None:
    """The target's last layer; q, k and v read the feature half of the draft layer's input."""
    copy_parameters(last.self_attn.o_proj, layer.self_attn.o_proj)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight[:, :hidden].mul_(0.1)
        weight[:, hidden:] = getattr(last.self_attn, name).weight
    copy_parameters(last.mlp, layer.mlp)
    copy_parameters(last.input_layernorm, layer.hidden_norm)
    copy_parameters(last.post_attention_layernorm, layer.post_attention_layernorm)


@torch.no_grad()
def _start_eagle(network: EagleNetwork) -> None:
    hidden = network.config.hidden_size
    network.fc.weight.mul_(0.1)
    network.fc.weight[:, -hidden:] += torch.eye(hidden)
    layer = decoder_layers(network.layers)[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


@torch.no_grad()
def fit_fusion(network: EagleNetwork, embedded: Tensor, features: Tensor, wanted: Tensor) -> float:
    """Sets the fusing linear to the least-squares predictor of f[t+1] from its inputs, x[t+1] and f[t].

    The layer's outputs are zero at first, so the head begins as this predictor, which would otherwise take thousands of
    gradient steps.

    Args:
        network: an untrained EAGLE-1 network.
        embedded: (N, H) embeddings of the token of row t.
        features: (N, H) f[t].
        wanted: (N, H) f[t+1].

    Returns:
        Share of the variance of `wanted` that the predictor explains.

    Mutates: the fusing linear's weight.
    """
    inputs, outputs = network.join(embedded, features).cpu().double(), wanted.cpu().double()  # MPS has no float64.
    gram = inputs.t() @ inputs
    # A hundred-thousandth of the mean eigenvalue: unused directions stay near zero.
    gram.diagonal().add_(1e-5 * gram.diagonal().mean())
    solution = torch.linalg.solve(gram, inputs.t() @ outputs)
    network.fc.weight.copy_(solution.t())
    left = (outputs - inputs @ solution).var(0).sum()
    return float(1 - left / outputs.var(0).sum())
