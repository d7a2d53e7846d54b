"""Teacher-forced drafts of an EAGLE head on the target's own answers, by training's forward and not the engine's.

Chains begin at every token of an answer. Depth i + 1 reads the token that depth i should have drafted, so that a
chain is the engine's as long as its drafts are right::

    answer     x5 x6 x7 x8        start x5: drafts of x6, x7, x8 at depths 1, 2, 3
    features   f4 f5 f6           position 4 pairs f4 with x5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from aquiline.check.readings import Reading
from aquiline.checkpoints.eagle.stored import head_from_stored
from aquiline.drafters.eagle_network import DraftHead, Eagle3Network
from aquiline.targets.rope import RotaryTable
from aquiline.targets.target import Feature, Target
from aquiline.training.features import compute_features
from aquiline.training.learners.unroll import unroll

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Answer:
    """A prompt with the target's greedy answer.

    Attributes:
        tokens: (n,) int64, prompt and answer.
        prompt_length: tokens of the prompt, ≥ 1.
        features: name → (n, H) float32; "final" among them.
    """

    tokens: Tensor
    prompt_length: int
    features: Mapping[Feature, Tensor]

    @property
    def starts(self) -> int:
        """Tokens below which a chain can begin: all of the answer but its last."""
        return max(0, len(self.tokens) - self.prompt_length - 1)


@dataclass(frozen=True, eq=False)
class Forced:
    """Chains of one answer.

    Attributes:
        drafts: (depths, starts) int64 target ids.
        accepted: (starts,) leading drafts that are the text's tokens.
        offered: (starts,) drafts that were judged: the accepted ones, and the first wrong one.
        overlap: sum over starts and depths of Σ min(draft's, target's probability): the share of drafts that the
            target would accept if both drew at temperature 1.
    """

    drafts: Ints
    accepted: Ints
    offered: Ints
    overlap: float


def capture(target: Target, tokens: Sequence[int], prompt_length: int, names: Sequence[Feature]) -> Answer:
    """Computes the target's features of a text."""
    ids = torch.tensor(list(tokens), device=target.device)
    rows = compute_features(target, ids, names).float()
    parts = torch.split(rows, target.shape.hidden_size, dim=-1)
    return Answer(ids, prompt_length, dict(zip(names, parts, strict=True)))


@torch.inference_mode()
def forced_chains(reading: Reading, answers: Sequence[Answer], target: Target, depths: int) -> list[Forced]:
    """Drafts a chain below every start of each answer, in float32.

    Args:
        reading: how the head is read.
        answers: with an answer of at least 2 tokens, and the reading's features.
        target: gives embeddings, and for EAGLE-1/2 the LM head.
        depths: longest draft, ≥ 1.
    """
    head = head_from_stored(reading.stored, torch.float32)
    network = head.network.to(target.device)
    rotary = RotaryTable(head.config.layer.rope, torch.float32, target.device)
    found = []
    for answer in answers:
        size, first = len(answer.tokens) - 1, answer.prompt_length - 1
        rows = torch.cat([answer.features[name] for name in reading.features], dim=-1)[:size]
        if reading.lag:
            rows = torch.cat((rows[:1].expand(reading.lag, -1), rows[: -reading.lag]))
        # The last steps read zeros beyond the text; what they draft is not judged.
        tokens = [pad(answer.tokens[1 + i :], (0, i))[:size] for i in range(depths)]
        embedded = [_embedded(head, target, ids)[None] for ids in tokens]
        positions = torch.arange(size, device=target.device)[None]
        streams = unroll(network, embedded, network.fuse(rows[None]), positions, rotary)
        picked = torch.stack([stream[0, first : first + answer.starts] for stream in streams])
        if isinstance(network, Eagle3Network):
            logits = network.logits(picked)
        else:
            logits = target.project(picked.to(target.dtype))
        found.append(_judged(logits, head.draft_to_target, target, answer, reading.label))
    return found


def _embedded(head: DraftHead, target: Target, tokens: Tensor) -> Tensor:
    own = head.embedding
    return target.embed(tokens).float() if own is None else embedding(tokens, own.to(tokens.device))


def _judged(logits: Tensor, mapping: Tensor | None, target: Target, answer: Answer, label: int) -> Forced:
    """Compares (depths, starts, Vd) logits with the text, `label` tokens after the one that each drafts."""
    depths, starts, _ = logits.shape
    device, first = logits.device, answer.prompt_length
    order = torch.arange(starts, device=device) + torch.arange(depths, device=device)[:, None] + 1 + label
    known, order = order <= starts, order.clamp(max=starts)
    # Row k is the target's distribution of the answer's token k.
    said = target.project(answer.features["final"][first - 1 : -1].to(target.dtype)).softmax(-1)
    ids = torch.arange(logits.shape[-1], device=device) if mapping is None else mapping.to(device)
    shared = torch.minimum(logits.softmax(-1), said[:, ids][order]).sum(-1)
    drafts = ids[logits.argmax(-1)]
    accepted = ((drafts == answer.tokens[first + order]) & known).int().cumprod(0).sum(0)
    offered = torch.minimum(accepted + 1, known.sum(0))
    return Forced(drafts.cpu().numpy(), accepted.cpu().numpy(), offered.cpu().numpy(), float(shared[known].sum()))
