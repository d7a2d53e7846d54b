"""EAGLE's ablation of what a row reads: variants of the EAGLE-1 network, trained and measured teacher-forced.

A row of EAGLE-1 joins the feature f[t] and the *next* token x[t+1]. Each variant replaces a part
of what the fusing linear reads, so that training, validation and the least-squares start are those
of the method::

    shifted (the method)   f[t]  x[t+1]
    unshifted              f[t]  x[t]
    feature                f[t]  0
    token                  0     x[t+1]

No engine drafts with the variants: their weights mean something else than a stored EAGLE-1 head's.

Source: EAGLE (arXiv 2401.15077, figures 4 and 8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aquiline.drafters.eagle_network import EagleNetwork


class UnshiftedNetwork(EagleNetwork):
    """Reads x[t] in place of x[t+1]: the row before holds it. Row 0 reads no token."""

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        own = torch.cat((torch.zeros_like(embedded[..., :1, :]), embedded[..., :-1, :]), dim=-2)
        return super().join(own, hidden)


class FeatureNetwork(EagleNetwork):
    """Reads the feature alone."""

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return super().join(torch.zeros_like(embedded), hidden)


class TokenNetwork(EagleNetwork):
    """Reads the token alone."""

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return super().join(embedded, torch.zeros_like(hidden))


VARIANTS: dict[str, type[EagleNetwork]] = {
    "unshifted": UnshiftedNetwork,
    "feature": FeatureNetwork,
    "token": TokenNetwork,
}
"""Inputs of a row → the network that reads them."""
