"""Runs a `Decoder` in forwards of few shapes: captured as CUDA graphs, compiled where asked.

A graph replays its kernels with one launch, but always on the same shapes and addresses. So a forward is padded to a
power of two of tokens, rows and attended slots, its *bucket*, and reads its inputs from tensors that the bucket keeps.
Padding tokens are seen by no other token; padding rows are slots that sit the step out, and they write
beyond their committed lengths, where a cache holds garbage anyway. Nothing in a replayed forward depends on numbers
that only the host knows, and nothing in it waits for the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from aquiline.cache import KVCache
from aquiline.targets.attention import static_frame
from aquiline.targets.decoder import Decoder
from aquiline.targets.target import Feature, TargetInput, TargetOutput, check_features
from aquiline.tree import select

logger = logging.getLogger("aquiline")

WIDEST = 64
"""Tokens of a row in the widest bucket; wider forwards run as they are."""

LEAST_SPAN = 256
"""Slots that the attention of the smallest bucket reads: reading a few more costs less than capturing more buckets."""

_MOST_BUCKETS = 1024
"""Compilations of one function that torch.compile is allowed; its own limit, 8, takes varying shapes for a mistake."""


@dataclass(frozen=True)
class Bucket:
    """The shape of a forward.

    Attributes:
        rows: the first rows of the cache; a power of two, or all.
        width: tokens of each row; a power of two.
        span: slots that the attention reads; a power of two, or all.
        causal: the tokens are a chain, without a mask of ancestors.
    """

    rows: int
    width: int
    span: int
    causal: bool
    features: tuple[Feature, ...]


@dataclass(frozen=True, eq=False)
class StaticInput:
    """The inputs of a bucket's forwards, always at the same addresses.

    Attributes:
        tokens: (rows, width) int64.
        positions: (rows, width) int64.
        lengths: (rows, 1) int64 committed tokens.
        ancestors: (rows, width, width) bool, or None in a causal bucket.
        rotary: cos and sin of all positions below the cache's capacity.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    ancestors: Tensor | None
    rotary: tuple[Tensor, Tensor]


@dataclass(eq=False)
class Capture:
    """A bucket's inputs for one cache, and on CUDA its graph.

    Attributes:
        keys: the cache's block; the capture is void once the cache has moved to a larger one.
        itself: (width, width) bool: each token sees itself alone, which keeps padding finite.
        replay: runs the graph; None before the first forward, and where there are no graphs.
    """

    keys: Tensor
    inputs: StaticInput
    itself: Tensor
    replay: Callable[[], TargetOutput] | None = None


def static_forward(
    decoder: Decoder, inputs: StaticInput, cache: KVCache, span: int, features: tuple[Feature, ...]
) -> TargetOutput:
    """Computes a bucket's forward; logits (rows, width, V) and features (rows, width, F) include the padding."""
    frame = static_frame(
        cache, span, inputs.lengths, inputs.positions, inputs.ancestors, inputs.rotary, decoder.config.windows,
        decoder.group,
    )  # fmt: skip
    return decoder.through_layers(inputs.tokens, frame, features)


class StaticDecoder:
    """A `Decoder` in forwards of few shapes; implements `Target`.

    Outputs are overwritten by the next forward: whoever keeps a part of one copies it.

    Args:
        decoder: computes; wide forwards and those that ask for some logits alone, as prompts do, run on it unpadded.
        backend: of torch.compile; None does not compile.

    Attributes:
        graphs: captures each bucket's forward and replays it; True on CUDA until a capture fails. Elsewhere, and
            then, forwards are called.
    """

    exact = False

    def __init__(self, decoder: Decoder, backend: Any = None) -> None:
        self.decoder = decoder
        self.shape, self.embed, self.project = decoder.shape, decoder.embed, decoder.project
        self.dtype: torch.dtype = decoder.dtype
        self.device: torch.device = decoder.device
        self._forward: Callable[..., TargetOutput] = static_forward if backend is None else _compiled(backend)
        self.graphs = self.device.type == "cuda"
        self._captures: WeakKeyDictionary[KVCache, dict[Bucket, Capture]] = WeakKeyDictionary()
        self._pool: Any = None  # of the graphs' memory: they run one after another and share it

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        # Room for padding: a cache that grows moves, and its graphs are captured again.
        return self.decoder.new_cache(rows, capacity + WIDEST)

    @torch.inference_mode()
    def forward(self, inputs: TargetInput) -> TargetOutput:
        width, cache = inputs.tokens.shape[1], inputs.cache
        if inputs.logits_at is not None or width > WIDEST:
            return self.decoder.forward(inputs)
        check_features(inputs.features, self.shape.num_layers)
        bucket = bucket_of(inputs)
        capture = self._capture(cache, bucket)
        fill(capture, inputs)
        arguments = (self.decoder, capture.inputs, cache, bucket.span, bucket.features)
        if self.graphs and capture.replay is None:
            capture.replay = self._graph_or_none(*arguments)
        out = capture.replay() if capture.replay else self._forward(*arguments)
        rows = select(self.device, inputs.rows)
        return TargetOutput(out.logits[rows, :width], None if out.features is None else out.features[rows, :width])

    def _capture(self, cache: KVCache, bucket: Bucket) -> Capture:
        captures = self._captures.setdefault(cache, {})
        if any(capture.keys is not cache.key_block for capture in captures.values()):
            captures.clear()
        if bucket not in captures:
            inputs = self._new_inputs(cache, bucket)
            itself = torch.eye(bucket.width, dtype=torch.bool, device=self.device)
            captures[bucket] = Capture(cache.key_block, inputs, itself)
        return captures[bucket]

    def _new_inputs(self, cache: KVCache, bucket: Bucket) -> StaticInput:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        shape = (bucket.rows, bucket.width)
        ancestors = None if bucket.causal else zeros(*shape, bucket.width, dtype=torch.bool)
        rotary = self.decoder.rotary_table.upto(cache.capacity)
        return StaticInput(zeros(*shape), zeros(*shape), zeros(bucket.rows, 1), ancestors, rotary)

    def _graph_or_none(self, *arguments: Any) -> Callable[[], TargetOutput] | None:
        try:
            return self._graph(*arguments)
        except RuntimeError as error:
            logger.warning("forwards run without CUDA graphs, more slowly, since a capture failed: %s", error)
            self.graphs = False
            return None

    def _graph(self, *arguments: Any) -> Callable[[], TargetOutput]:
        """Captures `static_forward` with these arguments.

        Source: PyTorch's notes on CUDA graphs: warm up on another stream, which also compiles, then capture.
        """
        here = torch.cuda.current_stream(self.device)
        aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(2):
                self._forward(*arguments)
        here.wait_stream(aside)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # A server's other threads may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
            out = self._forward(*arguments)

        def replay() -> TargetOutput:
            graph.replay()
            return out

        return replay


def bucket_of(inputs: TargetInput) -> Bucket:
    """Returns the bucket of a forward, and reserves its slots.

    Mutates: the capacity of the cache if it is too small.
    """
    cache, width = inputs.cache, _power(inputs.tokens.shape[1])
    rows = min(_power(max(inputs.rows) + 1), cache.rows)
    lengths = cache.lengths.tolist()
    cache.reserve(max(lengths[:rows]) + width)
    read = max(lengths[row] for row in inputs.rows) + width
    span = min(max(_power(read), LEAST_SPAN), cache.capacity)
    return Bucket(rows, width, span, inputs.ancestors is None, tuple(inputs.features))


def _power(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def fill(capture: Capture, inputs: TargetInput) -> None:
    """Copies the inputs of a forward to their places.

    Padding keeps the tokens and positions of earlier forwards: valid ones, which no other token sees.
    """
    into, width = capture.inputs, inputs.tokens.shape[1]
    rows = select(into.tokens.device, inputs.rows)
    into.lengths.copy_(inputs.cache.lengths[: len(into.lengths), None])
    into.tokens[rows, :width] = inputs.tokens
    into.positions[rows, :width] = inputs.positions
    if into.ancestors is not None:
        assert inputs.ancestors is not None
        into.ancestors.copy_(capture.itself)
        into.ancestors[rows, :width, :width] = inputs.ancestors


def _compiled(backend: Any) -> Callable[..., TargetOutput]:
    """Compiles `static_forward`: one graph without a break for each bucket."""
    compiled = torch.compile(static_forward, backend=backend, fullgraph=True, dynamic=False)

    @contextmanager
    def allowed() -> Iterator[None]:
        limits = {"recompile_limit": _MOST_BUCKETS, "accumulated_recompile_limit": _MOST_BUCKETS}
        with torch._dynamo.config.patch(limits):
            yield

    def run(*arguments: Any) -> TargetOutput:
        with allowed():
            return compiled(*arguments)

    return run
