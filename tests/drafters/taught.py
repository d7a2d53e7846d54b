"""Heads that know some texts: linear maps of random heads, fitted by least squares.

They are often right about these texts and sometimes wrong: an EAGLE head is not taught every fifth
token, and its deeper drafts read its own stream, which the fit has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aquiline.drafters.eagle_network import DraftHead, forward_network, new_draft_cache
from aquiline.drafters.parallel import ParallelHeads
from aquiline.drafters.parallel_network import HydraNetwork, MedusaNetwork, ParallelConfig
from aquiline.targets.decoder import Decoder
from aquiline.targets.rope import RotaryTable
from aquiline.training.features import compute_features
from tests import tiny

SHARPNESS = 12.0
"""Scale of EAGLE-3's fitted logits, so that known tokens are drafted with confidence."""


Texts = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(Prompt, answer) pairs."""


def eagle_head(kind: str, target: Decoder, texts: Texts) -> DraftHead:
    """An EAGLE head in float64 that knows the answers to prompts.

    Args:
        kind: "eagle" fits the MLP's last map to the target's feature ahead, "eagle3" the LM head to
            the tokens.
        target: a tiny target.
        texts: what it knows.
    """
    head = tiny.head(kind)
    config, network = head.config, head.network
    fitted = network.layers[0].mlp.down_proj if kind == "eagle" else network.lm_head
    known = sorted({token for _, answer in texts for token in answer})
    drafted = sorted([*known, *(t for t in range(tiny.VOCAB) if t not in known)][: config.draft_vocab_size])
    given, wanted = list[Tensor](), list[Tensor]()
    hook = fitted.register_forward_hook(lambda module, args, out: given.append(args[0]) or wanted.append(-out))
    for prompt, answer in texts:
        tokens = torch.tensor([*prompt, *answer])
        # The rows that predict answers, but for every fifth.
        rows = torch.tensor([t for t in range(len(prompt) - 1, len(tokens) - 2) if (t - len(prompt)) % 5 != 2])
        features = compute_features(target, tokens, (*config.features, "final"))
        read, final = features[:, : -config.hidden_size], features[:, -config.hidden_size :]
        stream = forward_network(
            network,
            target.embed(tokens[1:])[None],
            network.fuse(read[None, :-1]),
            torch.arange(len(tokens) - 1)[None],
            None,
            new_draft_cache(network, 1, 64, 256),
            [0],
            RotaryTable(config.layer.rope, torch.float64),
        )
        if kind == "eagle":
            # The stream without the fitted map is its residual; the rest is left to the map.
            wanted[-1] = (final[None, 1:] - (stream + wanted[-1]))[0, rows]
        else:
            network.logits(stream)
            wanted[-1] = SHARPNESS * (tokens[rows + 2, None] == torch.tensor(drafted)).double()
        given[-1] = given[-1][0, rows]
    hook.remove()
    with torch.no_grad():
        fitted.weight.copy_(_solve(torch.cat(given), torch.cat(wanted)))
    return DraftHead(network, None if kind == "eagle" else torch.tensor(drafted))


def parallel_heads(kind: str, target: Decoder, texts: Texts) -> ParallelHeads:
    """Three Medusa or Hydra heads in float64, each fitted to the feature of its own position ahead."""
    make = MedusaNetwork if kind == "medusa" else HydraNetwork
    network = make(ParallelConfig(kind, 3, 48, tiny.VOCAB, tiny.VOCAB)).double().requires_grad_(False)
    for head in range(3):
        given, wanted = list[Tensor](), list[Tensor]()
        for prompt, answer in texts:
            tokens = torch.tensor([*prompt, *answer])
            final = compute_features(target, tokens, ("final",))
            rows = torch.arange(len(prompt) - 1, len(tokens) - 1 - head)
            if kind == "medusa":
                given.append(network.read(head, final[rows]))
            else:
                path = torch.stack([tokens[rows + 1 + i] for i in range(head + 1)], 1)
                given.append(network.read(head, final[rows], target.embed(path)))
            wanted.append(final[rows + 1 + head])
        network.heads[head].linear.weight.copy_(_solve(torch.cat(given), torch.cat(wanted)))
    return ParallelHeads(network)


def _solve(x: Tensor, y: Tensor) -> Tensor:
    """The map W with W x ≈ y, (out, in)."""
    ridge = 1e-6 * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(x.T @ x + ridge, x.T @ y).T
