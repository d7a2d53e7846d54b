"""Where a draft head starts: from another head, or from the target's own last layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from aquiline.drafters.eagle import (
    DraftHead,
    Eagle3Network,
    EagleNetwork,
    HeadConfig,
    build_network,
)
from aquiline.targets.decoder import Decoder
from aquiline.targets.target import Feature, eagle3_layers
from aquiline.training.dataset import TrainingSet
from aquiline.training.settings import TrainSettings


def new_head(settings: TrainSettings, target: Decoder, sets: Iterable[TrainingSet]) -> DraftHead:
    """Makes an untrained head that begins as close to the target as its shape allows.

    The decoder layer gets the weights of the target's last layer (EAGLE-3's q, k and v on the
    feature half of their input), the LM head the target's rows, and the fusing linear passes
    the last feature through.

    Args:
        settings: kind, layers, vocabulary size and seed.
        target: the target.
        sets: training sets, for the draft vocabulary.
    """
    shape = target.shape
    eagle3 = settings.kind == "eagle3"
    layers: tuple[Feature, ...] = ("final",)
    if eagle3:
        layers = settings.layers or eagle3_layers(shape.num_layers)
    vocabulary = None
    if eagle3 and settings.draft_vocab_size < shape.vocab_size:
        vocabulary = draft_vocabulary(sets, settings.draft_vocab_size, shape.vocab_size)
    config = HeadConfig(
        kind=settings.kind,
        layer=target.config.layer,
        vocab_size=shape.vocab_size,
        draft_vocab_size=len(vocabulary) if vocabulary is not None else shape.vocab_size,
        target_hidden_size=shape.hidden_size,
        features=layers,
        max_positions=shape.max_positions,
    )
    torch.manual_seed(settings.seed)
    network = build_network(config)
    with torch.no_grad():
        if isinstance(network, Eagle3Network):
            _start_eagle3(network, target, vocabulary)
        else:
            _start_eagle(network, target)
    return DraftHead(network, vocabulary)


def _start_eagle3(network: Eagle3Network, target: Decoder, vocabulary: Tensor | None) -> None:
    hidden = network.config.hidden_size
    last, layer = target.layers[-1], network.midlayer
    network.fc.weight.mul_(0.1)
    network.fc.weight[:, -hidden:] += torch.eye(hidden)
    layer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight[:, :hidden].mul_(0.1)
        weight[:, hidden:] = getattr(last.self_attn, name).weight
    layer.mlp.load_state_dict(last.mlp.state_dict())
    layer.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
    layer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
    network.norm.load_state_dict(target.norm.state_dict())
    rows = target.lm_head.weight
    network.lm_head.weight.copy_(rows if vocabulary is None else rows[vocabulary])


def _start_eagle(network: EagleNetwork, target: Decoder) -> None:
    hidden = network.config.hidden_size
    if network.fc.weight.shape[1] == 2 * hidden:
        network.fc.weight.mul_(0.1)
        network.fc.weight[:, -hidden:] += torch.eye(hidden)
    state = target.layers[-1].state_dict()
    network.layers[0].load_state_dict({k: v for k, v in state.items() if not k.startswith("input_layernorm")})


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
