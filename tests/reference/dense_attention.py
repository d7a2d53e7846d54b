"""The readable twin of the attention of unrolled draft networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_attention(
    queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attends like `unrolled_attention`, with one score matrix of (T, steps · T)."""
    batch, heads, width, _ = queries.shape
    group = heads // keys[0].shape[1]
    own_row = torch.eye(width, dtype=torch.bool, device=queries.device).expand(batch, -1, -1)
    causal = torch.ones_like(own_row[0]).tril().expand(batch, -1, -1)
    first = causal if mask is None else mask > torch.finfo(mask.dtype).min
    visible = torch.cat([first, *[own_row] * (len(keys) - 1)], dim=-1)
    all_keys = torch.cat(list(keys), dim=2).repeat_interleave(group, dim=1)
    all_values = torch.cat(list(values), dim=2).repeat_interleave(group, dim=1)
    scores = queries @ all_keys.transpose(2, 3) * scale
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    mixed = torch.softmax(scores, dim=-1) @ all_values
    return mixed.transpose(1, 2).reshape(batch, width, -1)
