"""A pretended accelerator: tensors that compute on the CPU, say they are elsewhere, and refuse to be mixed.

Its device is called "pretended". Like CUDA, it accepts indices and numbers from the CPU and refuses
everything else; like MPS, it has no float64. It counts kernels, copies in both directions, and the
operations that wait for the device because the size of their result depends on its values.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretended")
# Autocast, which gradient checkpointing saves and restores, asks every registered device for its dtypes.
torch.get_device_module("pretended").get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
DEVICE = torch.device("pretended", 0)

_COPIES = ("aten::_to_copy", "aten::copy_")
_READS = ("_local_scalar_dense", "equal", "is_nonzero")
_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_FREE = (
    "detach",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "_local_scalar_dense",
)
_FUSED = ("aten::scaled_dot_product_attention", "aten::rms_norm")


@dataclass
class Counts:
    """Calls by the line of the package that made them."""

    kernels: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)
    to_device: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        for counter in (self.kernels, self.to_host, self.to_device):
            counter.clear()


class Away(torch.Tensor):
    """A tensor on the pretended device; `inner` holds its values."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Away:
        away = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        away.inner = inner
        return away

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the pretended device outside of `pretended_device`")


@contextmanager
def pretended_device() -> Iterator[Counts]:
    """Makes the device usable and counts what runs on it."""
    counts = Counts()
    with _Operations(counts), _Functions():
        yield counts


def _line() -> str:
    """The innermost line of the package that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame and "/src/aquiline/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/src/aquiline/')[2]}:{frame.f_lineno}" if frame else "outside"


def _is_away(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, Away) else value


def _wrap(value: Any) -> Any:
    return Away(value) if isinstance(value, torch.Tensor) and not isinstance(value, Away) else value


class _Traits(NamedTuple):
    name: str
    decomposes: bool
    view: bool
    writes: bool


@cache
def _traits(func: Any) -> _Traits:
    name, aliases = func._schema.name, [r.alias_info for r in func._schema.returns if r.alias_info]
    decomposes = name not in _FUSED and func._can_decompose()
    return _Traits(name, decomposes, any(not a.is_write for a in aliases), any(a.is_write for a in aliases))


class _Operations(TorchDispatchMode):
    """Runs each operation on the inner tensors, after checking where its tensors lie."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, (name, decomposes, _, writes) = dict(kwargs or {}), _traits(func)
        if decomposes:
            with self:  # inference mode passes composite functions on as they are
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        away = [tensor for tensor in tensors if isinstance(tensor, Away)]
        asked = kwargs.get("device")
        lands = _is_away(asked) if asked is not None else isinstance(args[0], Away) if name in _COPIES else bool(away)
        if name in _COPIES:
            self._count_copy(isinstance(args[name == "aten::copy_"], Away), lands)
        elif away or lands:
            self._check(func, name, args, kwargs, tensors)
            lands = lands and name.removeprefix("aten::") not in _READS
        if asked is not None:
            kwargs["device"] = torch.device("cpu") if _is_away(asked) else asked
        result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
        if not lands:
            return result
        self._check_float64(name, result)
        if writes:
            return kwargs["out"] if "out" in kwargs else args[0]
        return tree_map(_wrap, result)

    def _count_copy(self, leaves: bool, lands: bool) -> None:
        if leaves or lands:
            counter = (
                self.counts.kernels if leaves and lands else self.counts.to_host if leaves else self.counts.to_device
            )
            counter[_line()] += 1

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        home = [tensor for tensor in tensors if not isinstance(tensor, Away) and tensor.dim() > 0]
        if name in _INDEXING and isinstance(args[0], Away):
            indices = [index for index in args[1] if index is not None]
            self.counts.to_device[_line()] += sum(not isinstance(index, Away) for index in indices)
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.counts.to_host[_line()] += 1
            home = [tensor for tensor in home if all(tensor is not index for index in indices)]
        if home:
            raise RuntimeError(f"{_line()}: {func} mixes the pretended device and the CPU")
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"{_line()}: {func} draws on the pretended device with a CPU generator")
        bare = name.removeprefix("aten::")
        if bare in _READS or bare in _SIZED_BY_VALUES:
            self.counts.to_host[_line()] += 1
        if not _traits(func).view and bare not in _FREE:
            self.counts.kernels[_line()] += 1

    def _check_float64(self, name: str, result: Any) -> None:
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result)):
            raise RuntimeError(f"{_line()}: {name} makes float64, which MPS lacks")


class PretendedGraph(TorchDispatchMode):
    """A CUDA graph without CUDA: records kernels with their tensors, and runs them again without the code around them.

    As in a CUDA graph, numbers that the host knew are those of the capture, and each result lands where it did then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, (name, decomposes, view, writes) = dict(kwargs or {}), _traits(func)
        if decomposes:
            with self:
                return func.decompose(*args, **kwargs)
        if name.removeprefix("aten::") in (*_READS, *_SIZED_BY_VALUES):
            raise RuntimeError(f"{_line()}: {func} waits for the device, which a graph cannot")
        result = func(*args, **kwargs)
        if writes or not view:
            self.kernels.append((func, args, kwargs, None if writes else result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.kernels:
            again = func(*args, **kwargs)
            if result is not None:
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    old.copy_(new)


class _Stream:
    """A stream whose work is done; a class, because annotations in transformers name it."""

    def __init__(self, device: Any) -> None: ...

    def wait_stream(self, other: _Stream) -> None: ...


@contextmanager
def pretended_graphs(patch: Any) -> Iterator[list[ref[PretendedGraph]]]:
    """Makes `torch.cuda` capture pretended graphs; yields references to them as they are captured.

    As in CUDA's allocator, a pool lives as long as a graph that was captured with it, and cannot be used afterwards.
    """
    graphs: list[ref[PretendedGraph]] = []
    pools: defaultdict[object, list[ref[PretendedGraph]]] = defaultdict(list)

    @contextmanager
    def graph(captured: PretendedGraph, pool: object, **_: Any) -> Iterator[None]:
        if pools[pool] and not any(user() for user in pools[pool]):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        for users in (graphs, pools[pool]):
            users.append(ref(captured))
        with captured:
            yield

    stubs = {
        "current_stream": _Stream, "Stream": _Stream, "stream": lambda stream: nullcontext(),
        "graph_pool_handle": object, "CUDAGraph": PretendedGraph, "graph": graph,
    }  # fmt: skip
    for name, stub in stubs.items():
        patch.setattr(torch.cuda, name, stub)
    yield graphs


class _Functions(TorchFunctionMode):
    """Replaces functions that PyTorch runs below the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func in (torch.tensor, torch.as_tensor) and _is_away(kwargs.get("device")):
            return func(*args, **(kwargs | {"device": "cpu"})).to(DEVICE)
        if not isinstance(first, Away):
            return func(*args, **kwargs)
        if func is torch.Tensor.new_tensor:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", first.dtype)).to(DEVICE)
        if func is torch.Tensor.tolist:
            return first.cpu().tolist()
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return func(first, _index(args[1]), *args[2:])
        return func(*args, **kwargs)


def _index(index: Any) -> Any:
    """Lists of numbers as the CPU tensors that they become."""
    if isinstance(index, tuple):
        return tuple(_index(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index
