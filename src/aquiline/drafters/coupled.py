"""Coupled drafts: the draft races with the noise that the target's own draw will use.

The token of output position t is argmax p_v / E_v with noise E of (seed, t); see `aquiline.race`. At temperature
> 0 the likeliest draft token is often not the winner, so the draft proposes argmax q_v^γ / E_v. The two agree
with probability at least (1 − TV) / (1 + TV) at γ = 1, where TV is the total variation between p and q. The
output stays the one that the seed gives, whatever is drafted.

Source: arXiv 2408.07978; differs: γ > 1 sharpens q, which agrees more often for diffuse drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aquiline.drafters.drafter import Rows
from aquiline.native.library import Library, Race, find_library
from aquiline.native.race import delays, race_of
from aquiline.race import noise
from aquiline.sampling import SamplingParams

GAMMA = 1.3
"""γ of heads that were not measured; best of 1 … 2 for smollm2-eagle3 at T = 1 and 0.7."""

_NUCLEUS = 128
"""top_p is applied to a draft where this many tokens hold it; sorting all of them would take longer than drafting."""


class Coupling:
    """Turns a draft's logits into the finishing order of its race.

    The order of q^γ / E with q = softmax(logits / T) is that of logits − (T / γ) · log E. The softmax of these
    numbers also estimates how likely each draft is accepted: it is as calibrated as the draft's own
    probabilities are at T = 0, which it equals there.

    Args:
        draft_to_target: (Vd,) int64 target ids of the draft ids, or None if they coincide.
        gamma: γ, exponent of the draft's probabilities, > 0; None takes `GAMMA`.
    """

    def __init__(self, draft_to_target: Tensor | None = None, gamma: float | None = None) -> None:
        self.gamma = GAMMA if gamma is None else gamma
        self._ids = None if draft_to_target is None else draft_to_target.cpu()
        self._tokens = None if self._ids is None else self._ids.numpy().astype(np.uint32)

    def __call__(self, logits: Tensor, rows: Rows, depth: int) -> Tensor:
        """Returns logits of the race, float32 where a row samples; rows at temperature 0 keep their own.

        Args:
            logits: (B, Vd) or (B, W, Vd) draft logits of nodes whose children lie at `depth`.
            rows: the B rows; each races with its request's noise, temperature, top_k, top_p and min_p.
            depth: level of the children, ≥ 1; they are drafts for output position t + depth − 1 if the
                target's next token has position t.
        """
        if not rows.sample:
            return logits
        racing = [i for i, chooser in enumerate(rows.choosers) if chooser.params.temperature > 0]
        races = self.races(rows, depth)
        library = find_library()[0] if logits.device.type == "cpu" else None
        times = torch.stack([self._delays(library, races[i], logits.shape[-1]) for i in racing])
        raced = list(logits.float())
        for i, own in zip(racing, times.to(logits.device), strict=True):  # one copy for all rows
            raced[i] = _kept(raced[i], rows.choosers[i].params) - own
        return torch.stack(raced)

    def races(self, rows: Rows, depth: int = 1) -> list[Race]:
        """Describes each row's race for drafts at `depth`."""
        return [
            race_of(chooser.params, chooser.seed, len(text) - chooser.prompt_length + depth - 1, self.gamma)
            for chooser, text in zip(rows.choosers, rows.texts, strict=True)
        ]

    def _delays(self, library: Library | None, race: Race, size: int) -> Tensor:
        """Returns (Vd,) float32 logarithms of the noise, times T / γ."""
        if library is not None:
            return delays(library, race, self._ids, size)
        tokens = size if self._tokens is None else self._tokens
        return noise(race.seed, race.position, tokens).double().log_().mul_(race.factor).float()


def _kept(scores: Tensor, params: SamplingParams) -> Tensor:
    """Bars the tokens of a draft that top_k, top_p or min_p would drop; (…, V) → (…, V)."""
    floors = []
    if params.min_p > 0:
        floors.append(scores.amax(-1, keepdim=True) + params.temperature * math.log(params.min_p))
    count = min(params.top_k or _NUCLEUS, scores.shape[-1])
    best = scores.topk(count, dim=-1).values if params.top_k or params.top_p < 1 else scores
    if params.top_k:
        floors.append(best[..., -1:])
    if params.top_p < 1:
        warm = max(params.temperature, _COLDEST)
        total = ((best if params.top_k else scores) / warm).logsumexp(-1, keepdim=True)
        # The token that reaches top_p is the last one kept; without one among the best, all stay.
        last = ((best / warm - total).exp().cumsum(-1) < params.top_p).sum(-1, keepdim=True)
        floors.append(torch.nn.functional.pad(best, (0, 1), value=-torch.inf).gather(-1, last))
    return scores.masked_fill(scores < torch.cat(floors, -1).amax(-1, keepdim=True), -torch.inf) if floors else scores


_COLDEST = 1e-6
"""Dividing logits by a lower temperature could overflow; the nucleus is one token long before."""


def agreement(draft: Tensor, target: Tensor, gammas: Sequence[float], draft_to_target: Tensor | None = None) -> Tensor:
    """Probability that the coupled draft is the target's own draw at temperature 1, exact over the noise.

    Token v wins both races if E_w ≥ E_v · max(p_w / p_v, r_w / r_v) for every w, where r is q^γ normalised. With the
    tokens in decreasing order of p / r, the maximum is the first term up to v and the second after it::

        P(v wins both) = 1 / Σ_w max(p_w / p_v, r_w / r_v) = 1 / (Σ_{w ≤ v} p_w / p_v + Σ_{w > v} r_w / r_v)

    Args:
        draft: (n, Vd) draft logits.
        target: (n, V) target logits at the same positions.
        gammas: the values of γ, each > 0.
        draft_to_target: (Vd,) int64 target ids of the draft ids, or None if they coincide.

    Returns:
        (len(gammas), n) in 0 … 1.
    """
    law, found = target.softmax(-1), []
    p = law if draft_to_target is None else law[:, draft_to_target]
    never = (1 - p.sum(-1, keepdim=True)).clamp(min=0)  # tokens that are never drafted come before all others
    for gamma in gammas:
        r = (draft * gamma).softmax(-1)
        order = (p.log() - r.log()).nan_to_num(0).argsort(dim=-1, descending=True)
        p_sorted, r_sorted = p.gather(-1, order).clamp(min=_SMALLEST), r.gather(-1, order).clamp(min=_SMALLEST)
        before = never + p_sorted.cumsum(-1)
        after = r_sorted.flip(-1).cumsum(-1).flip(-1) - r_sorted
        found.append((1 / (before / p_sorted + after / r_sorted)).sum(-1))
    return torch.stack(found)


_SMALLEST = 1e-30
"""Stands for a probability of 0, whose quotients would be undefined."""
