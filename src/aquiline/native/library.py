"""The built kernels as a library of C functions, and the structs that they take (see ``abi.h``)."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, c_char, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (loads the OpenMP runtime that the kernels' symbols resolve to)

from aquiline.native.build import BuildError, build


class Matrix(ctypes.Structure):
    """A packed weight, see ``matrix.h``."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias", "scales")),
        *((name, c_int32) for name in ("vectors", "inputs", "kind", "group")),
    )


class Layer(ctypes.Structure):
    """One decoder layer."""

    _fields_ = (
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("first_norm", c_void_p),
        ("second_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("window", c_int32),
        ("rotated", c_int32),
    )


class Stack(ctypes.Structure):
    """A decoder stack: a target's or a draft network's."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", Matrix),
        ("fuse", Matrix),
        ("embedding_norm", c_void_p),
        ("hidden_norm", c_void_p),
        *(
            (name, c_int32)
            for name in (
                *("num_layers", "hidden", "heads", "kv_heads", "dim", "rotary_half", "inner", "vocab"),
                *("half", "gelu", "entry", "reads", "norm_before_residual"),
            )
        ),
        ("eps", c_float),
        ("scale", c_float),
        ("reserved", c_int32),
    )


class Call(ctypes.Structure):
    """One forward of a stack."""

    _fields_ = (
        *((name, c_int32) for name in ("batch", "width", "offset", "threads")),
        *(
            (name, c_void_p)
            for name in (
                *("tokens", "embedded", "hidden", "positions", "ancestors", "committed", "rows"),
                *("cosines", "sines", "keys", "values"),
            )
        ),
        *((name, c_int64) for name in ("angles", "cache_rows", "capacity")),
        *((name, c_void_p) for name in ("features", "feature_out", "logits_at", "logits", "stream_out")),
        ("num_features", c_int32),
        ("asked", c_int32),
        ("message", c_char * 160),
    )


class Readout(ctypes.Structure):
    """Norms and a product for rows on their own."""

    _fields_ = (
        ("matrix", Matrix),
        ("norm", c_void_p),
        *((name, c_int32) for name in ("inputs", "parts", "outputs", "half_in", "half_out")),
        ("eps", c_float),
    )


class ReadoutCall(ctypes.Structure):
    """One use of a readout."""

    _fields_ = (("x", c_void_p), ("out", c_void_p), ("n", c_int64), ("threads", c_int32), ("reserved", c_int32))


class Chain(ctypes.Structure):
    """A draft network with what makes chains of it."""

    _fields_ = (
        ("stack", POINTER(Stack)),
        ("logits", POINTER(Readout)),
        ("feedback", POINTER(Readout)),
        ("embedding", c_void_p),
        ("to_target", c_void_p),
        ("embeddings", c_int64),
    )


class ChainCall(ctypes.Structure):
    """One draft of chains."""

    _fields_ = (
        ("call", POINTER(Call)),
        *((name, c_void_p) for name in ("logits", "tokens", "scores")),
        ("levels", c_int32),
        ("done", c_int32),
        ("floor", c_float),
        ("reserved", c_int32),
    )


class Facts(ctypes.Structure):
    """What the library says about itself."""

    _fields_ = tuple(
        (name, c_int32)
        for name in (
            *("lanes", "pair_dots", "tiles"),
            *("stack_size", "layer_size", "call_size", "readout_size", "readout_call_size"),
            *("chain_size", "chain_call_size"),
        )
    )


TOKENS, FUSED, PAIRED = 0, 1, 2
"""How a stream begins, `Stack.entry`."""

EMBEDDED, HIDDEN = 1, 2
"""What EAGLE-1's fusing product reads, bits of `Stack.reads`."""


@dataclass(frozen=True, eq=False)
class Library:
    """The loaded kernels.

    Attributes:
        path: of the file.
        forward: ``aquiline_forward``.
        read_out: ``aquiline_read_out``.
        draft: ``aquiline_draft``.
        advise: ``aquiline_advise``.
        lanes: outputs in a vector, on which the layout of weights depends.
        instructions: what bfloat16 products run on, for `aquiline doctor`.
        vectors: what all else runs on, float32 products too.
    """

    path: Path
    forward: Callable[..., int]
    read_out: Callable[..., int]
    draft: Callable[..., int]
    advise: Callable[..., None]
    lanes: int
    instructions: str
    vectors: str


def open_library(path: Path) -> Library:
    """Loads a built library.

    Raises:
        BuildError: if it cannot be loaded, or does not fit this version of the package.
    """
    try:
        handle: Any = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load the kernels: {error}") from error
    handle.aquiline_forward.argtypes = [POINTER(Stack), POINTER(Call)]
    handle.aquiline_read_out.argtypes = [POINTER(Readout), POINTER(ReadoutCall)]
    handle.aquiline_draft.argtypes = [POINTER(Chain), POINTER(ChainCall)]
    handle.aquiline_advise.argtypes, handle.aquiline_advise.restype = [c_void_p, c_uint64], None
    handle.aquiline_facts.argtypes, handle.aquiline_facts.restype = [POINTER(Facts)], None
    facts = Facts()
    handle.aquiline_facts(ctypes.byref(facts))
    sizes = [
        getattr(facts, f"{name}_size")
        for name in ("stack", "layer", "call", "readout", "readout_call", "chain", "chain_call")
    ]
    expected = [ctypes.sizeof(struct) for struct in (Stack, Layer, Call, Readout, ReadoutCall, Chain, ChainCall)]
    if sizes != expected:
        raise BuildError(f"{path} does not fit this version of the package: structs of {sizes} bytes, not {expected}")
    vectors = "AVX-512" if facts.lanes == 16 else "8-lane vectors"
    products = "AMX" if facts.tiles else f"{vectors} with bfloat16" if facts.pair_dots else vectors
    return Library(
        path,
        handle.aquiline_forward,
        handle.aquiline_read_out,
        handle.aquiline_draft,
        handle.aquiline_advise,
        facts.lanes,
        products,
        vectors,
    )


@cache
def find_library() -> tuple[Library | None, str]:
    """Builds and loads the kernels, once per process.

    Returns:
        The library and what it runs on, or None and why there is none. A failure is also printed,
        as one line.
    """
    if os.environ.get("AQUILINE_NATIVE", "1") == "0":
        return None, "turned off by AQUILINE_NATIVE=0"
    try:
        library = open_library(build())
    except BuildError as error:
        print(f"aquiline: no CPU kernels, the slower path runs: {error}", file=sys.stderr, flush=True)
        return None, str(error)
    return library, library.instructions
