"""Calls the kernels with checked tensors, so that no input can crash them."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aquiline.cache import KVCache
from aquiline.native.codes import Codes
from aquiline.native.library import TOKENS, Call, Library, Readout, ReadoutCall, Stack
from aquiline.native.packing import Memory

FINAL = -1
"""Name of the normed stream among the boundaries of a forward."""


@dataclass(frozen=True, eq=False)
class Angles:
    """Cosines and sines by position.

    Attributes:
        cosines: (positions, rotary width / 2) float32.
    """

    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True, eq=False)
class Inputs:
    """The nodes of one forward.

    Attributes:
        ancestors: (B, T, offset + T) bool, or None for causal order.
        embedded: (B, T, H) of a draft network.
        hidden: (B, T, H) of a draft network.
        offset: uncommitted slots in use before these.
    """

    positions: Tensor
    ancestors: Tensor | None
    rows: Sequence[int]
    tokens: Tensor | None = None
    embedded: Tensor | None = None
    hidden: Tensor | None = None
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Outputs:
    """The results of one forward; None if not requested.

    Attributes:
        stream: (B, T, H) after the last layer.
        best: (B, K) int64 arg-max of the logits, -1 where one is NaN.
    """

    logits: Tensor | None
    features: Tensor | None
    stream: Tensor | None
    best: Tensor | None


@dataclass(frozen=True, eq=False)
class NativeStack:
    """A packed decoder stack.

    Attributes:
        struct: their view of the weights; its pointers go into `memory`.
        dtype: of the weights, the cache, features and streams.
    """

    library: Library
    struct: Stack
    memory: Memory
    dtype: torch.dtype
    _last: list[tuple[Any, ...]] = field(default_factory=list, repr=False)

    def describe(self) -> str:
        """Names the weights' form and the instructions."""
        library = self.library
        if self.memory.form:
            return f"native {self.memory.form} ({library.instructions})"
        used = library.instructions if self.dtype == torch.bfloat16 else library.vectors
        return f"native {str(self.dtype).removeprefix('torch.')} ({used})"

    def forward(
        self,
        inputs: Inputs,
        cache: KVCache,
        angles: Angles,
        features: Sequence[int] = (),
        logits_at: Tensor | None = None,
        *,
        stream: bool = False,
    ) -> Outputs:
        """Runs the stack; writes keys and values after the committed ones, and does not advance the lengths.

        Args:
            features: boundaries of the stream to return; `FINAL` is the one after the final norm.
            logits_at: (B, K) int64 nodes whose logits are returned; None for all.
            stream: return the stream after the last layer, and no logits.

        Raises:
            ValueError: for sizes, dtypes, tokens, positions or rows that do not fit.
        """
        batch, width = self._size(inputs)
        given = self._given(inputs, batch, width)
        asked = width if logits_at is None else logits_at.shape[-1]
        if logits_at is not None:
            given["logits_at"] = _checked("logits_at", logits_at, torch.int64, (batch, asked))
        lengths, boundaries = cache.lengths.tolist(), array("i", features)
        numbers = array("q", [*(lengths[row] for row in inputs.rows), *inputs.rows])
        out = self._outputs(batch, width, asked, len(features), stream)
        call = self.prepare(cache, angles)
        call.batch, call.width, call.offset = batch, width, inputs.offset
        for name, tensor in given.items():
            setattr(call, name, tensor.data_ptr())
        first = numbers.buffer_info()[0]
        call.committed, call.rows = first, first + batch * numbers.itemsize
        call.features, call.num_features = boundaries.buffer_info()[0], len(features)
        call.feature_out, call.logits, call.stream_out = map(_address, (out.features, out.logits, out.stream))
        call.best, call.asked = _address(out.best), asked
        if self.library.forward(self.struct, call):
            raise ValueError(call.message.decode())
        return out

    def prepare(self, cache: KVCache, angles: Angles) -> Call:
        """Makes a call over `cache`.

        Raises:
            ValueError: if the blocks of `cache` are not those of this stack.
        """
        last = self._last[0] if self._last else None
        if last and last[0]() is cache.key_block and last[1]() is cache.value_block and last[2]() is angles:
            call = Call.from_buffer_copy(last[3])  # checked already
        else:
            call = self._over(cache, angles)
            # Not the blocks themselves, which would keep an old cache in memory.
            owners = weakref.ref(cache.key_block), weakref.ref(cache.value_block), weakref.ref(angles)
            self._last[:] = [(*owners, Call.from_buffer_copy(call))]
        call.threads = torch.get_num_threads()
        return call

    def _over(self, cache: KVCache, angles: Angles) -> Call:
        struct = self.struct
        shape = (struct.num_layers, cache.rows, struct.kv_heads, cache.capacity, struct.dim)
        for name, block in (("key", cache.key_block), ("value", cache.value_block)):
            if block.shape != shape or block.dtype != self.dtype or not block.is_contiguous():
                raise ValueError(
                    f"the {name} block has shape {tuple(block.shape)}, dtype {block.dtype} and strides "
                    f"{block.stride()}; allowed: contiguous {shape}, {self.dtype}; make it with new_cache"
                )
        return Call(
            cosines=_address(angles.cosines), sines=_address(angles.sines), angles=len(angles.cosines),
            keys=_address(cache.key_block), values=_address(cache.value_block),
            cache_rows=cache.rows, capacity=cache.capacity,
        )  # fmt: skip

    def _size(self, inputs: Inputs) -> tuple[int, int]:
        sizes = inputs.positions.shape
        if len(sizes) != 2 or 0 in sizes:
            raise ValueError(f"positions have shape {tuple(sizes)}; allowed: (rows, nodes), at least one of each")
        if len(inputs.rows) != sizes[0] or len(set(inputs.rows)) != sizes[0]:
            raise ValueError(f"rows are {list(inputs.rows)}; allowed: {sizes[0]} distinct rows of the cache")
        return sizes[0], sizes[1]

    def _given(self, inputs: Inputs, batch: int, width: int) -> dict[str, Tensor]:
        """Returns the checked inputs that this stack reads, by their names in `Call`."""
        given = {"positions": _checked("positions", inputs.positions, torch.int64, (batch, width))}
        if inputs.ancestors is not None:
            shape = (batch, width, inputs.offset + width)
            given["ancestors"] = _checked("ancestors", inputs.ancestors, torch.bool, shape)
        for name in ("tokens",) if self.struct.entry == TOKENS else ("embedded", "hidden"):
            tensor: Tensor | None = getattr(inputs, name)
            if tensor is None:
                raise ValueError(f"{name} are missing; this stack reads them")
            if name == "tokens":
                given[name] = _checked(name, tensor, torch.int64, (batch, width))
            else:
                given[name] = _checked(name, tensor, self.dtype, (batch, width, self.struct.hidden))
        return given

    def _outputs(self, batch: int, width: int, asked: int, features: int, stream: bool) -> Outputs:
        hidden = self.struct.hidden
        return Outputs(
            None if stream else torch.empty(batch, asked, self.struct.vocab),
            torch.empty(batch, width, features * hidden, dtype=self.dtype) if features else None,
            torch.empty(batch, width, hidden, dtype=self.dtype) if stream else None,
            None if stream else torch.empty(batch, asked, dtype=torch.int64),
        )


@dataclass(frozen=True, eq=False)
class NativeReadout:
    """A packed norm and product for rows on their own."""

    library: Library
    struct: Readout
    memory: Memory
    dtype_in: torch.dtype
    dtype_out: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Computes (…, inputs) → (…, outputs).

        Raises:
            ValueError: for a width or a dtype that does not fit.
        """
        struct = self.struct
        x = _checked("the rows", x, self.dtype_in, (*x.shape[:-1], struct.inputs))
        out = torch.empty(*x.shape[:-1], struct.outputs, dtype=self.dtype_out)
        count = x.numel() // struct.inputs
        if count:
            call = ReadoutCall(x.data_ptr(), out.data_ptr(), count, torch.get_num_threads(), 0)
            if self.library.read_out(struct, call):
                raise MemoryError(f"no memory for a product of {count} rows")
        return out


def readout(
    memory: Memory,
    weight: Tensor | Codes | None,
    dtype: torch.dtype,
    *,
    inputs: int,
    norm: Tensor | None = None,
    parts: int = 1,
    bias: Tensor | None = None,
    wide: bool = False,
    eps: float = 0.0,
) -> NativeReadout:
    """Packs a readout.

    Args:
        weight: (outputs, inputs), or None for the norm alone.
        parts: equal parts of a row that are normed on their own.
        wide: the results are float32, whatever the dtype.
    """
    outputs = inputs if weight is None else (weight.values if isinstance(weight, Codes) else weight).shape[0]
    struct = Readout(
        norm=None if norm is None else memory.keep(norm), inputs=inputs, parts=parts,
        outputs=outputs,
        half_in=dtype == torch.bfloat16, half_out=dtype == torch.bfloat16 and not wide, eps=eps,
    )  # fmt: skip
    if weight is not None:
        struct.matrix = memory.matrix(weight, bias)
    return NativeReadout(memory.library, struct, memory, dtype, torch.float32 if wide else dtype)


def _checked(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} have shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}; "
            f"allowed: {shape}, {dtype}, on the CPU; convert them"
        )
    return tensor.contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
