"""Reads and writes the map from draft ids to target ids, in any of its stored forms.

A head that drafts Vd of V tokens stores `d2t` (Vd,) as the *offset* target id − draft id (GGUF
files: as the absolute target id) and `t2d` (V,), true for the tokens that it can draft::

    target ids       3  4  9        d2t (offset)    3  3  7
    draft ids        0  1  2        t2d             0 0 0 1 1 0 0 0 0 1

A head that drafts all V tokens has neither, or both filled with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor


def resolve_vocabulary(
    d2t: Tensor | None, t2d: Tensor | None, draft_size: int, target_size: int, place: str
) -> tuple[Tensor | None, str]:
    """Finds the target ids of a head's draft ids and checks them.

    Args:
        d2t: (Vd,) integers as stored, or None.
        t2d: (V,) bool (or 0/1) as stored, or None.
        draft_size: Vd.
        target_size: V.

    Returns:
        (Vd,) int64 increasing target ids, or None if draft and target ids coincide; and how they were found, as text.

    Raises:
        ValueError: if there is no map, or it is out of range, unsorted or contradicts itself.
    """
    _check_shapes(d2t, t2d, draft_size, target_size, place)
    if draft_size == target_size:
        return _whole(d2t, t2d, target_size, place)
    if draft_size > target_size:
        raise ValueError(f"{place}: draft_vocab_size {draft_size} is larger than the target's vocab_size {target_size}")
    member = None if t2d is None else t2d.to(torch.bool)
    if member is not None and int(member.sum()) != draft_size:
        raise ValueError(
            f"{place}: t2d marks {int(member.sum())} tokens, expected draft_vocab_size = {draft_size}; "
            "the head was saved with another vocabulary map, fetch or train it again"
        )
    if d2t is None:
        if member is None:
            raise ValueError(
                f"{place}: neither d2t nor t2d is there, but the head drafts {draft_size} of {target_size} tokens; "
                "without the map it would draft wrong tokens, get the file that its training saved"
            )
        return member.nonzero().flatten(), "built from t2d"
    return _from_d2t(d2t.to(torch.int64), member, target_size, place)


def offsets(ids: Tensor) -> Tensor:
    """Returns d2t, (Vd,) int64 target id − draft id."""
    return ids.to(torch.int64).cpu() - torch.arange(len(ids))


def membership(ids: Tensor, target_size: int) -> Tensor:
    """Returns t2d, (V,) bool."""
    member = torch.zeros(target_size, dtype=torch.bool)
    member[ids.cpu()] = True
    return member


def _check_shapes(d2t: Tensor | None, t2d: Tensor | None, draft_size: int, target_size: int, place: str) -> None:
    for name, tensor, size, origin in (
        ("d2t", d2t, draft_size, "draft_vocab_size"),
        ("t2d", t2d, target_size, "the target's vocab_size"),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != (size,):
            raise ValueError(
                f"{place}: {name} has shape {tuple(tensor.shape)}, expected ({size},), {origin}; fetch the head again"
            )
        if tensor.is_floating_point() or tensor.is_complex() or (name == "d2t" and tensor.dtype == torch.bool):
            raise ValueError(f"{place}: {name} has dtype {tensor.dtype}, expected integers; fetch the head again")


def _whole(d2t: Tensor | None, t2d: Tensor | None, size: int, place: str) -> tuple[Tensor | None, str]:
    """Checks that a map of all tokens, if stored, holds zeros or the identity."""
    if d2t is not None and not (bool((d2t == 0).all()) or torch.equal(d2t.to(torch.int64), torch.arange(size))):
        raise ValueError(
            f"{place}: d2t moves tokens although draft_vocab_size = vocab_size = {size}, where draft and target "
            "ids are the same; the config or the map belongs to another head"
        )
    if t2d is not None and int(t2d.to(torch.bool).sum()) not in (0, size):
        raise ValueError(f"{place}: t2d leaves tokens out although draft_vocab_size = vocab_size = {size}")
    return None, "all tokens of the target, no map"


def _from_d2t(stored: Tensor, member: Tensor | None, target_size: int, place: str) -> tuple[Tensor | None, str]:
    as_offset = stored + torch.arange(len(stored))
    candidates = [(as_offset, "d2t read as offsets"), (stored, "d2t read as absolute ids")]
    valid = [(ids, source) for ids, source in candidates if _flaw(ids, target_size) is None]
    if not valid:
        raise ValueError(
            f"{place}: d2t {_flaw(as_offset, target_size)}; expected target id − draft id with target ids increasing "
            f"from 0 … {target_size - 1}; fetch the head again"
        )
    if member is None:
        # Both readings are possible for a map without neighbours; all dialects but GGUF store offsets.
        return valid[0]
    agreeing = [(ids, source) for ids, source in valid if torch.equal(membership(ids, target_size), member)]
    if not agreeing:
        ids = valid[0][0]
        differing = int((membership(ids, target_size) != member).sum())
        raise ValueError(
            f"{place}: t2d and d2t disagree about {differing} tokens; one of them was regenerated for other data, "
            "get both from the same training run"
        )
    ids, source = agreeing[0]
    return ids, source + ", t2d agrees"


def _flaw(ids: Tensor, target_size: int) -> str | None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target_size:
        return f"leads to target id {low if low < 0 else high}, outside 0 … {target_size - 1}"
    if not bool((ids.diff() > 0).all()):
        where = int((ids.diff() <= 0).nonzero()[0]) + 1
        return f"is not sorted: draft id {where} leads to target id {int(ids[where])} after {int(ids[where - 1])}"
    return None
