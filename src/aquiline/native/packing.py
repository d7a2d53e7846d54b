"""Packs weights in the layout of the kernels: vectors of outputs, see ``matrix.h``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from aquiline.native.codes import Codes, WeightFormat, laid_out, picked, quantise
from aquiline.native.library import Library, Matrix

INPUT_PAD = 64
"""Inputs of a product are padded with zeros to a multiple of this."""

LINE_LANES = 16
"""Words in a cache line."""

ALIGNMENT = 64
HUGE_PAGE = 1 << 21
DTYPES = (torch.float32, torch.bfloat16)
"""In the order of the kinds in ``matrix.h``, before the integers."""

INT8, INT4 = 2, 3

UNIT_INPUTS, UNIT_BYTES, TABLE_SIZE = 8, 192, 16
"""Sizes of squeezed weights, see ``squeezed.h``."""

MOST_ODD = 0.05
"""Share of odd units up to which squeezing pays."""


def padded(size: int, to: int) -> int:
    """Rounds `size` up to a multiple of `to`."""
    return -(-size // to) * to


@dataclass(eq=False)
class Memory:
    """Owns the weights that a stack's structs point to.

    The weights lie in few large pieces, in the order in which they are read, on huge pages where the
    system has them.

    Attributes:
        form: to which matrices are quantised, or None to keep them.
    """

    library: Library
    form: WeightFormat | None = None
    kept: list[Tensor] = field(default_factory=list)
    _piece: Tensor | None = None
    _used: int = 0

    def reserve(self, size: int) -> None:
        """Opens a new piece of `size` bytes for the weights that follow."""
        piece = torch.empty(size + HUGE_PAGE + ALIGNMENT, dtype=torch.uint8)
        self.library.advise(piece.data_ptr(), piece.numel())
        self.kept.append(piece)
        # A piece begins on a page of its own.
        self._piece, self._used = piece, -piece.data_ptr() % HUGE_PAGE

    def place(self, tensor: Tensor) -> int:
        """Copies a tensor into the piece; returns its address."""
        size = padded(tensor.numel() * tensor.element_size(), ALIGNMENT)
        if self._piece is None or self._used + size > self._piece.numel():
            self.reserve(max(size, 16 * HUGE_PAGE))
        assert self._piece is not None
        at = self._piece[self._used : self._used + tensor.numel() * tensor.element_size()]
        at.view(tensor.dtype).copy_(tensor.reshape(-1))
        self._used += size
        return at.data_ptr()

    def keep(self, tensor: Tensor) -> int:
        """Keeps a float32 copy of a tensor; returns its address."""
        self.kept.append(tensor.detach().float().contiguous().clone())
        return self.kept[-1].data_ptr()

    def norm(self, norm: nn.Module | None) -> int | None:
        """Keeps the weight of a norm; None for None or an identity."""
        weight = getattr(norm, "weight", None)
        return None if weight is None else self.keep(weight)

    def matrix(
        self,
        weight: Tensor | Codes,
        bias: Tensor | None = None,
        rows: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> Matrix:
        """Packs a matrix.

        Args:
            weight: (outputs, inputs) float32 or bfloat16, quantised to `form`; or integers, in their own order.
            bias: (outputs,) or None.
            rows: int64 order of the outputs, -1 for a row of zeros; None for the given order.
            columns: as `rows`, for the inputs.
        """
        if isinstance(weight, Codes):
            assert rows is None and columns is None, "integers are packed in their own order"
        else:
            weight = picked(picked(weight.detach(), rows, 0), columns, 1)
            weight = weight if self.form is None else quantise(weight, self.form)
        outputs, inputs = (weight.values if isinstance(weight, Codes) else weight).shape
        lanes = self.library.lanes
        width, vectors = padded(inputs, INPUT_PAD), -(-outputs // lanes)
        result = Matrix(vectors=vectors, inputs=width)
        if isinstance(weight, Codes):
            words, scales = laid_out(weight, lanes, width)
            result.kind, result.group = INT8 if weight.minima is None else INT4, weight.group
            result.scales = self.place(scales)
        else:
            weight = nn.functional.pad(weight, (0, width - inputs, 0, vectors * lanes - outputs))
            per_lane = 2 if weight.dtype == torch.bfloat16 else 1
            words = weight.view(vectors, lanes, width // per_lane, per_lane).transpose(1, 2)
            result.kind = DTYPES.index(weight.dtype)
        if not self._squeeze(words, result):
            result.weight = self.place(_lines(words, lanes))
        if bias is not None:
            bias = picked(bias.detach().float(), rows, 0)
            result.bias = self.keep(nn.functional.pad(bias, (0, vectors * lanes - outputs)))
        return result

    def _squeeze(self, words: Tensor, result: Matrix) -> bool:
        """Packs bfloat16 weights in 12 bits, see ``squeezed.h``; returns False if that does not pay.

        Args:
            words: (vectors, inputs / 2, 16, 2).
            result: receives the addresses.
        """
        if words.dtype != torch.bfloat16 or not self.library.squeezes:
            return False
        words = words.contiguous()
        vectors, units = len(words), words.shape[1] * 2 // UNIT_INPUTS
        lines = torch.empty(vectors, units, UNIT_BYTES, dtype=torch.uint8)
        tables, odd = (torch.empty(vectors, size, dtype=torch.uint8) for size in (TABLE_SIZE, units))
        self.library.squeeze(
            words.data_ptr(), vectors, units * UNIT_INPUTS, lines.data_ptr(), tables.data_ptr(), odd.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        counts = odd.sum(1)
        if int(counts.sum()) > MOST_ODD * odd.numel():
            return False
        result.weight = self.place(lines)
        # An additional unit, -1, ends each vector's list.
        numbers = torch.arange(units + 1, dtype=torch.int32).where(torch.arange(units + 1) < units, -1)
        listed = nn.functional.pad(odd, (0, 1), value=1).bool()
        begin = (counts.cumsum(0) - counts + torch.arange(vectors)).int()
        # (vectors, units, half, word, four lanes, lane, element): interleaving bytes joins the words of a half.
        upper = words.view(vectors, units, 2, 2, 4, 4, 2).view(torch.uint8)[..., 1::2][odd.bool()].transpose(2, 3)
        for name, tensor in (
            ("tables", tables),
            ("odd_begin", begin),
            ("odd_units", numbers.expand(vectors, -1)[listed]),
            ("odd_lines", upper),
        ):
            self.kept.append(tensor.contiguous())
            setattr(result, name, self.kept[-1].data_ptr())
        return True


def _lines(words: Tensor, lanes: int) -> Tensor:
    """Puts vectors that share a cache line side by side.

    Args:
        words: (vectors, steps, lanes, …).
        lanes: 8 or 16.

    Returns:
        (lines, steps, 16 / lanes, lanes, …), the last line filled up with zeros.
    """
    shared = LINE_LANES // lanes
    words = torch.cat((words, words.new_zeros(-len(words) % shared, *words.shape[1:])))
    return words.view(-1, shared, *words.shape[1:]).transpose(1, 2)


def padded_heads(heads: int, dim: int, lanes: int) -> Tensor:
    """Returns the order in which each of `heads` heads of `dim` channels is padded to whole vectors."""
    order = torch.full((heads, padded(dim, lanes)), -1)
    order[:, :dim] = torch.arange(heads * dim).view(heads, dim)
    return order.flatten()


def alternating(size: int, lanes: int) -> Tensor:
    """Returns the order of [gate, up], each of `size` rows: a vector of gates, its vector of ups, and so on."""
    gates = torch.full((padded(size, lanes),), -1)
    gates[:size] = torch.arange(size)
    ups = torch.where(gates < 0, gates, gates + size)
    return torch.stack((gates.view(-1, lanes), ups.view(-1, lanes)), 1).flatten()
