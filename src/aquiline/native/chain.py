"""Drafts whole chains in one call of the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.cache import KVCache
from aquiline.native.library import MOST_KEPT, Chain, ChainCall, Race
from aquiline.native.stack import Angles, NativeReadout, NativeStack


@dataclass(frozen=True, eq=False)
class NativeChain:
    """A draft network and the tables that turn its logits into the next level's input.

    Attributes:
        logits: (…, H) → (…, Vd) float32.
        feedback: maps the stream to the next level's hidden state; None if they are the same.
        embedding: (V, H) of the stack's dtype.
        draft_to_target: (Vd,) int64, or None if the ids coincide.
    """

    stack: NativeStack
    logits: NativeReadout
    feedback: NativeReadout | None
    embedding: Tensor
    draft_to_target: Tensor | None

    def __post_init__(self) -> None:
        hidden, dtype = self.stack.struct.hidden, self.stack.dtype
        table, ids = self.embedding, self.draft_to_target
        good = table.dtype == dtype and table.shape[1:] == (hidden,) and table.is_contiguous()
        if not (good and self.logits.dtype_in == dtype and self.logits.struct.inputs == hidden):
            raise ValueError(
                f"the embedding is {tuple(table.shape)}, {table.dtype} and the logits read {self.logits.struct.inputs} "
                f"inputs, {self.logits.dtype_in}; allowed: contiguous (V, {hidden}), {dtype}"
            )
        if ids is not None and (ids.shape != (self.logits.struct.outputs,) or ids.dtype != torch.int64):
            raise ValueError(f"draft_to_target is {tuple(ids.shape)}, {ids.dtype}; allowed: one int64 for each logit")

    def draft(
        self,
        logits: Tensor,
        hidden: Tensor,
        cache: KVCache,
        rows: Sequence[int],
        angles: Angles,
        floors: Sequence[float],
        kept: int = 1,
        races: Sequence[Race] = (),
    ) -> tuple[Tensor, Tensor]:
        """Drafts the likeliest tokens by level, each level below the best of the last; the cache does not advance.

        Args:
            logits, hidden: (B, Vd) float32 and (B, H) feedback at the roots.
            cache, angles: with room for one position of each row and level below the first.
            floors: of ≥ 1 levels; the draft ends after one where the rows' joint probabilities sum to less.
            kept: candidates of each level, 1 to 8.
            races: B of the first level, if a row samples: candidates are the first of its race.

        Returns:
            (B, L, k) int64 target ids, likeliest first, and float32 joint log-probabilities, -inf beyond the ids.
        """
        self._check(logits, hidden, rows, len(floors), kept, races)
        positions, slots, levels = cache.lengths[list(rows)], torch.tensor(list(rows)), len(floors)
        logits = logits.to(torch.float32, copy=True).contiguous()  # the call writes into the copies
        hidden = hidden.to(self.stack.dtype, copy=True).contiguous()
        embedded, stream = torch.empty_like(hidden), torch.empty_like(hidden)
        tokens, scores = (torch.empty(len(rows), levels, kept, dtype=dtype) for dtype in (torch.int64, torch.float32))
        limits, raced = (ctypes.c_float * levels)(*floors), (Race * len(races))(*races) if races else None
        call = self.stack.prepare(
            cache, angles, batch=len(rows), width=1, embedded=embedded.data_ptr(), hidden=hidden.data_ptr(),
            positions=positions.data_ptr(), committed=positions.data_ptr(), rows=slots.data_ptr(),
            stream_out=stream.data_ptr(),
        )  # fmt: skip
        results = logits.data_ptr(), tokens.data_ptr(), scores.data_ptr(), ctypes.addressof(limits)
        chains = ChainCall(ctypes.pointer(call), *results, raced, levels, kept, 0, 0)
        if self.stack.library.draft(self._struct(), chains):
            raise ValueError(call.message.decode())
        return tokens[:, : chains.done], scores[:, : chains.done]

    def _check(
        self, logits: Tensor, hidden: Tensor, rows: Sequence[int], levels: int, kept: int, races: Sequence[Race]
    ) -> None:
        batch = len(rows)
        if logits.shape != (batch, self.logits.struct.outputs) or hidden.shape != (batch, self.stack.struct.hidden):
            raise ValueError(f"logits and hidden are {tuple(logits.shape)}, {tuple(hidden.shape)} for {batch} rows")
        if levels < 1 or not batch or len(set(rows)) != batch:
            raise ValueError(f"{levels} levels below rows {list(rows)}; allowed: at least one, distinct rows")
        if not 1 <= kept <= MOST_KEPT:
            raise ValueError(f"kept is {kept}; allowed: 1 to {MOST_KEPT}")
        if len(races) not in (0, batch):
            raise ValueError(f"{len(races)} races for {batch} rows; allowed: one for each, or none")

    def _struct(self) -> Chain:
        ids = self.draft_to_target
        return Chain(
            ctypes.pointer(self.stack.struct), ctypes.pointer(self.logits.struct),
            None if self.feedback is None else ctypes.pointer(self.feedback.struct),
            self.embedding.data_ptr(), None if ids is None else ids.data_ptr(), len(self.embedding),
        )  # fmt: skip
