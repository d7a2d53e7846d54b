"""Drafts whole trees in one call of the kernels, and reads what became text in another."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aquiline.cache import KVCache
from aquiline.native.library import MOST_KEPT, Call, DraftCall, DraftNetwork, IngestCall, Race
from aquiline.native.stack import Angles, NativeReadout, NativeStack
from aquiline.tree import DraftTree


@dataclass(frozen=True)
class Growth:
    """How trees grow, level by level.

    Attributes:
        levels: ≥ 1.
        kept: children of a node, its likeliest tokens, 1 to 16.
        width: nodes of a level that have children, the best ones, 1 to `kept`; 1 grows chains with siblings.
        limit: drafts that remain of a row, the best ones; None: all.
        least: joint probability from which they remain.
        floors: by level; the draft ends after one where the probabilities of the rows' best nodes sum to less. Empty:
            it ends where no further node can remain.
    """

    levels: int
    kept: int = 1
    width: int = 1
    limit: int | None = None
    least: float = 0.0
    floors: Sequence[float] = ()

    @property
    def most(self) -> int:
        """Most drafts of a row."""
        made = self.kept * (1 + (self.levels - 1) * self.width)
        return made if self.limit is None else min(self.limit, made)

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError if the draft has fewer tokens than a node has children."""
        if self.kept > size:
            raise ValueError(f"kept is {self.kept}; allowed: 1 to {size}, the draft's tokens")

    def __post_init__(self) -> None:
        if self.levels < 1 or len(self.floors) not in (0, self.levels):
            raise ValueError(f"{self.levels} levels with {len(self.floors)} floors; allowed: at least one, all or none")
        if not 1 <= self.width <= self.kept <= MOST_KEPT or (self.limit is not None and self.limit < 1):
            raise ValueError(
                f"width is {self.width}, kept {self.kept}, limit {self.limit}; "
                f"allowed: 1 ≤ width ≤ kept ≤ {MOST_KEPT}, limit ≥ 1"
            )


@dataclass(frozen=True, eq=False)
class NativeDraft:
    """A draft network and the tables that turn its logits into the next level's input.

    Attributes:
        fuse: maps the target's features to hidden states; None if they are the same.
        logits: (…, H) → (…, Vd) float32.
        feedback: maps the stream to the next level's hidden state; None if they are the same.
        embedding: (V, H) of the stack's dtype.
        draft_to_target: (Vd,) int64, or None if the ids coincide.
    """

    stack: NativeStack
    fuse: NativeReadout | None
    logits: NativeReadout
    feedback: NativeReadout | None
    embedding: Tensor
    draft_to_target: Tensor | None
    _network: DraftNetwork = field(init=False, repr=False)

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
        network = DraftNetwork(
            ctypes.pointer(self.stack.struct), _pointer(self.fuse), ctypes.pointer(self.logits.struct),
            _pointer(self.feedback),
            table.data_ptr(), None if ids is None else ids.data_ptr(), len(table),
        )  # fmt: skip
        object.__setattr__(self, "_network", network)

    def draft(
        self,
        roots: Sequence[int],
        logits: Tensor,
        hidden: Tensor,
        cache: KVCache,
        rows: Sequence[int],
        angles: Angles,
        growth: Growth,
        races: Sequence[Race] = (),
    ) -> tuple[DraftTree, int]:
        """Drafts a tree below each root; the cache does not advance.

        Args:
            roots: B tokens.
            logits, hidden: (cache rows, Vd) float32 and (cache rows, H), the logits and feedback at `rows`' roots.
            cache, angles: with room for `growth.width` positions of each row and level below the first.
            races: B of the first level, if a row samples: candidates are the first of its race.

        Returns:
            The trees with log-probabilities, and the number of levels that were drafted.
        """
        self._check(hidden, logits, cache, rows)
        _check_each(len(rows), roots, races)
        growth.check_vocabulary(self.logits.struct.outputs)
        batch, levels, room = len(rows), growth.levels, 1 + growth.most
        tokens, parents = torch.empty(batch, room, dtype=torch.int64), torch.empty(batch, room, dtype=torch.int64)
        scores, counts = torch.empty(batch, room), torch.empty(batch, dtype=torch.int64)
        floors = array("f", growth.floors or [0.0] * levels)
        call, given, _numbers = self._call(cache, angles, rows, growth.width, 0, roots)
        draft = DraftCall(
            ctypes.addressof(call), logits.data_ptr(), hidden.data_ptr(), given, floors.buffer_info()[0],
            (Race * batch)(*races) if races else None,
            tokens.data_ptr(), parents.data_ptr(), counts.data_ptr(), scores.data_ptr(),
            math.log(growth.least) if growth.least > 0 else -math.inf, levels, growth.kept, growth.most,
        )  # fmt: skip
        if self.stack.library.draft(self._network, draft):
            raise ValueError(call.message.decode())
        size = draft.size
        return DraftTree(tokens[:, :size], parents[:, :size], counts, scores[:, :size]), draft.done

    def ingest(
        self,
        tokens: Sequence[Sequence[int]],
        features: Tensor,
        cache: KVCache,
        rows: Sequence[int],
        angles: Angles,
        hidden: Tensor,
        logits: Tensor,
    ) -> None:
        """Runs the network on new positions, after which `draft` continues; the cache does not advance.

        Args:
            tokens: B rows of at most T tokens, those after the positions.
            features: (B, T, F) of the target, padded.
            cache, angles: with room for T positions of each row.
            hidden, logits: (cache rows, H) and (cache rows, Vd) float32, the feedback and logits at roots.

        Mutates: content of `cache`; `hidden` and `logits` at `rows`.
        """
        self._check(hidden, logits, cache, rows)
        width = features.shape[1]
        inputs = self.stack.struct.hidden if self.fuse is None else self.fuse.struct.inputs
        _check_contiguous("features", features, self.stack.dtype, (len(rows), width, inputs))
        counts = [len(row) for row in tokens]
        if len(counts) != len(rows) or max(counts) > width:
            raise ValueError(f"{counts} tokens for features {tuple(features.shape)}; allowed: one for each")
        padded = [token for row in tokens for token in (*row, *[0] * (width - len(row)))]
        call, ids, numbers = self._call(cache, angles, rows, width, 1, [*padded, *counts])
        sizes = ids + len(padded) * numbers.itemsize
        given = IngestCall(
            ctypes.addressof(call), features.data_ptr(), ids, sizes, hidden.data_ptr(), logits.data_ptr()
        )
        if self.stack.library.ingest(self._network, given):
            raise ValueError(call.message.decode())

    def _call(
        self, cache: KVCache, angles: Angles, rows: Sequence[int], width: int, stride: int, more: Sequence[int]
    ) -> tuple[Call, int, array[int]]:
        """Prepares a call of `width` nodes a row, whose positions are `stride` apart.

        Returns:
            The call, the address of the numbers in `more`, and what owns them and those of the call.
        """
        lengths, batch = cache.lengths.tolist(), len(rows)
        lengths = [lengths[row] for row in rows]
        positions = [length + stride * i for length in lengths for i in range(width)]
        numbers = array("q", [*lengths, *rows, *positions, *more])
        first, size = numbers.buffer_info()[0], numbers.itemsize
        call = self.stack.prepare(cache, angles)
        call.batch, call.width = batch, width
        call.committed, call.rows, call.positions = first, first + batch * size, first + 2 * batch * size
        return call, first + (2 * batch + batch * width) * size, numbers

    def _check(self, hidden: Tensor, logits: Tensor, cache: KVCache, rows: Sequence[int]) -> None:
        if not rows or len(set(rows)) != len(rows):
            raise ValueError(f"rows are {list(rows)}; allowed: at least one, distinct rows")
        _check_contiguous("hidden", hidden, self.stack.dtype, (cache.rows, self.stack.struct.hidden))
        _check_contiguous("logits", logits, torch.float32, (cache.rows, self.logits.struct.outputs))


def _check_each(count: int, roots: Sequence[int], races: Sequence[Race]) -> None:
    if len(roots) != count or len(races) not in (0, count):
        raise ValueError(f"{len(roots)} roots and {len(races)} races for {count} rows; allowed: one for each")


def _check_contiguous(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} are {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}; "
            f"allowed: contiguous {shape}, {dtype}, on the CPU"
        )


def _pointer(readout: NativeReadout | None) -> Any:
    return None if readout is None else ctypes.pointer(readout.struct)
