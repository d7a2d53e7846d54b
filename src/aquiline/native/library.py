"""Loads the built kernels as C functions, and mirrors the structs that they take (see ``abi.h``)."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, c_char, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (loads the OpenMP runtime that the kernels' symbols resolve to)

from aquiline.native.build import BuildError, build


def _all(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class Matrix(ctypes.Structure):
    """A packed weight, see ``matrix.h``."""

    _fields_ = (
        *_all(c_void_p, "weight bias scales"),
        *_all(c_int32, "vectors inputs kind group"),
        *_all(c_void_p, "tables odd_begin odd_units odd_lines"),
    )


class Layer(ctypes.Structure):
    """One decoder layer."""

    _fields_ = (
        *_all(Matrix, "qkv out gate_up down"),
        *_all(c_void_p, "first_norm second_norm query_norm key_norm"),
        *_all(c_int32, "window rotated"),
    )


class Stack(ctypes.Structure):
    """A decoder stack: a target's or a draft network's."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        *_all(c_void_p, "embedding final_norm"),
        *_all(Matrix, "head fuse"),
        *_all(c_void_p, "embedding_norm hidden_norm"),
        *_all(c_int32, "num_layers hidden heads kv_heads dim rotary_half inner vocab"),
        *_all(c_int32, "half gelu entry norm_before_residual"),
        *_all(c_float, "eps scale"),
    )


class Call(ctypes.Structure):
    """One forward of a stack."""

    _fields_ = (
        *_all(c_int32, "batch width offset threads"),
        *_all(c_void_p, "tokens embedded hidden positions ancestors committed rows cosines sines keys values"),
        *_all(c_int64, "angles cache_rows capacity"),
        *_all(c_void_p, "features feature_out logits_at logits stream_out best"),
        *_all(c_int32, "num_features asked"),
        ("message", c_char * 160),
    )


class Readout(ctypes.Structure):
    """Norms and a product for rows on their own."""

    _fields_ = (
        ("matrix", Matrix),
        ("norm", c_void_p),
        *_all(c_int32, "inputs parts outputs half_in half_out"),
        ("eps", c_float),
    )


class ReadoutCall(ctypes.Structure):
    """One use of a readout."""

    _fields_ = (*_all(c_void_p, "x out"), ("n", c_int64), *_all(c_int32, "threads reserved"))


class DraftNetwork(ctypes.Structure):
    """A draft network and the tables that turn its logits into the next level's input."""

    _fields_ = (
        ("stack", POINTER(Stack)),
        *_all(POINTER(Readout), "fuse logits feedback"),
        *_all(c_void_p, "embedding to_target"),
        ("embeddings", c_int64),
    )


class Race(ctypes.Structure):
    """A row that samples: the noise of its next token, and its settings."""

    _fields_ = (
        ("seed", c_uint64),
        ("position", c_int64),
        ("factor", c_double),
        *_all(c_float, "temperature top_p min_p"),
        ("top_k", c_int32),
    )


class DraftCall(ctypes.Structure):
    """One draft of trees."""

    _fields_ = (
        *_all(c_void_p, "call logits feedback roots floors"),
        ("races", POINTER(Race)),
        *_all(c_void_p, "tokens parents counts scores"),
        ("least", c_double),
        *_all(c_int32, "levels kept limit done size reserved"),
    )


class IngestCall(ctypes.Structure):
    """New positions of some rows."""

    _fields_ = _all(c_void_p, "call features tokens counts feedback logits")


_STRUCTS = (Stack, Layer, Call, Readout, ReadoutCall, DraftNetwork, DraftCall, IngestCall, Race)


class Facts(ctypes.Structure):
    """The library's instruction set, and its sizes of `_STRUCTS` in bytes."""

    _fields_ = (*_all(c_int32, "lanes pair_dots tiles squeezes"), ("sizes", c_int32 * len(_STRUCTS)))


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "forward": (c_int32, POINTER(Stack), POINTER(Call)),
    "read_out": (c_int32, POINTER(Readout), POINTER(ReadoutCall)),
    "draft": (c_int32, POINTER(DraftNetwork), POINTER(DraftCall)),
    "ingest": (c_int32, POINTER(DraftNetwork), POINTER(IngestCall)),
    "draw": (c_int64, POINTER(Race), c_void_p, c_int32),
    "delays": (None, POINTER(Race), c_void_p, c_int32, c_void_p),
    "advise": (None, c_void_p, c_uint64),
    "squeeze": (None, c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int32),
    "facts": (None, POINTER(Facts)),
}
"""The C functions without their prefix: results and arguments."""

MOST_KEPT = 16
"""Most children of a node in a `DraftCall`, and most nodes of a level that have some."""

TOKENS, FUSED, PAIRED = 0, 1, 2
"""Values of `Stack.entry`: how the residual stream begins."""


@dataclass(frozen=True, eq=False)
class Library:
    """The loaded kernels.

    Attributes:
        path: the file; the functions are those of ``native.cpp`` without their prefix.
        lanes: outputs in a vector, on which the layout of weights depends.
        instructions: those of bfloat16 products, for `aquiline doctor`.
        vectors: those of everything else, float32 products included.
        squeezes: it reads bfloat16 weights in 12 bits.
    """

    path: Path
    forward: Callable[..., int]
    read_out: Callable[..., int]
    draft: Callable[..., int]
    ingest: Callable[..., int]
    draw: Callable[..., int]
    delays: Callable[..., None]
    advise: Callable[..., None]
    squeeze: Callable[..., None]
    lanes: int
    instructions: str
    vectors: str
    squeezes: bool


def open_library(path: Path) -> Library:
    """Loads a built library.

    Raises:
        BuildError: if it cannot be loaded, or does not fit this version of the package.
    """
    try:
        handle: Any = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load the kernels: {error}") from error
    functions = {name: getattr(handle, f"aquiline_{name}") for name in _FUNCTIONS}
    for name, function in functions.items():
        function.restype, *function.argtypes = _FUNCTIONS[name]
    facts = Facts()
    functions.pop("facts")(ctypes.byref(facts))
    sizes, expected = list(facts.sizes), [ctypes.sizeof(struct) for struct in _STRUCTS]
    if sizes != expected:
        raise BuildError(f"{path} does not fit this version of the package: structs of {sizes} bytes, not {expected}")
    vectors = "AVX-512" if facts.lanes == 16 else "8-lane vectors"
    products = "AMX" if facts.tiles else f"{vectors} with bfloat16" if facts.pair_dots else vectors
    return Library(
        path=path,
        lanes=facts.lanes,
        instructions=products,
        vectors=vectors,
        squeezes=bool(facts.squeezes),
        **functions,
    )


@cache
def find_library() -> tuple[Library | None, str]:
    """Builds and loads the kernels, once per process.

    Returns:
        The library and its instructions, or None and the reason. A failed build is also printed, as one line.
    """
    if os.environ.get("AQUILINE_NATIVE", "1") == "0":
        return None, "turned off by AQUILINE_NATIVE=0"
    try:
        library = open_library(build())
    except BuildError as error:
        print(f"aquiline: no CPU kernels, the slower path runs: {error}", file=sys.stderr, flush=True)
        return None, str(error)
    return library, library.instructions
