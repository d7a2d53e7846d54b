"""Runs a `Decoder` in forwards of few shapes: captured as CUDA graphs, compiled where asked.

A graph replays its kernels with one launch, but always on the same shapes and addresses. So a forward is padded to a
power of two of tokens, rows and attended slots, its *bucket*, and reads its inputs from tensors that the bucket keeps.
Padding tokens are seen by no other token; padding rows are slots that sit the step out, and they write
beyond their committed lengths, where a cache holds garbage anyway. Nothing in a replayed forward depends on numbers
that only the host knows, and nothing in it waits for the host.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from aquiline.cache import SCRATCH, KVCache
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

_CAPTURING = Lock()
"""CUDA captures one graph at a time in a process: before each, PyTorch waits for the whole device."""


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
        itself: (width, width) bool: each token sees itself alone, which keeps padding finite.
        replay: runs the graph; None before the first forward, and where there are no graphs.
    """

    inputs: StaticInput
    itself: Tensor
    replay: Callable[[], TargetOutput] | None = None


@dataclass(eq=False)
class Blocks:
    """The blocks of a cache, with the captures that read and write them.

    Attributes:
        user: the cache; once it is gone, another may take the blocks over.
        pool: of the memory of the graphs, which run one after another and share it. Pools die with their last graph,
            so no two caches share one.
    """

    keys: Tensor
    values: Tensor
    user: ref[KVCache]
    captures: dict[Bucket, Capture] = field(default_factory=dict)
    pool: Any = None


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
        self._blocks: WeakKeyDictionary[KVCache, Blocks] = WeakKeyDictionary()
        self._last: deque[Blocks] = deque(maxlen=1)  # whose append and pop are atomic: engines may share a target
        self._aside: Any = None  # the stream of all captures: blocks of a pool belong to a stream

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Allocates a cache, or takes over the last one's blocks and graphs where nobody uses them any more."""
        capacity += WIDEST  # room for padding: a cache that grows moves, and its graphs are captured again
        longest = self.shape.max_positions
        with suppress(IndexError):  # there is none
            last = self._last.pop()
            large = last.keys.shape[3] >= min(capacity, longest + SCRATCH)
            if last.user() is None and last.keys.shape[1] == rows and large:
                with torch.inference_mode():
                    # A masked slot is still multiplied by a weight of 0, and 0 · NaN is NaN.
                    blocks = last.keys.zero_(), last.values.zero_()
                cache = KVCache(*blocks, torch.zeros(rows, dtype=torch.int64), longest)
                self._hold(cache, last)
                return cache
            del last  # before its successor is allocated
        return self.decoder.new_cache(rows, capacity)

    def _hold(self, cache: KVCache, blocks: Blocks) -> Blocks:
        blocks.user = ref(cache)
        self._blocks[cache] = blocks
        self._last.append(blocks)
        return blocks

    @torch.inference_mode()
    def forward(self, inputs: TargetInput) -> TargetOutput:
        width, cache = inputs.tokens.shape[1], inputs.cache
        if inputs.logits_at is not None or width > WIDEST:
            return self.decoder.forward(inputs)
        check_features(inputs.features, self.shape.num_layers)
        bucket = bucket_of(inputs)
        blocks = self._blocks.get(cache)
        if blocks is None or blocks.keys is not cache.key_block:
            blocks = self._hold(cache, Blocks(cache.key_block, cache.value_block, ref(cache)))
        if bucket not in blocks.captures:
            itself = torch.eye(bucket.width, dtype=torch.bool, device=self.device)
            blocks.captures[bucket] = Capture(self._new_inputs(cache, bucket), itself)
        capture = blocks.captures[bucket]
        fill(capture, inputs)
        arguments = (self.decoder, capture.inputs, cache, bucket.span, bucket.features)
        if self.graphs and capture.replay is None:
            capture.replay = self._graph_or_none(blocks, *arguments)
        out = capture.replay() if capture.replay else self._forward(*arguments)
        rows = select(self.device, inputs.rows)
        return TargetOutput(out.logits[rows, :width], None if out.features is None else out.features[rows, :width])

    def _new_inputs(self, cache: KVCache, bucket: Bucket) -> StaticInput:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        shape = (bucket.rows, bucket.width)
        ancestors = None if bucket.causal else zeros(*shape, bucket.width, dtype=torch.bool)
        rotary = self.decoder.rotary_table.upto(cache.capacity)
        return StaticInput(zeros(*shape), zeros(*shape), zeros(bucket.rows, 1), ancestors, rotary)

    def _graph_or_none(self, blocks: Blocks, *arguments: Any) -> Callable[[], TargetOutput] | None:
        try:
            with _CAPTURING:
                return self._graph(blocks, *arguments)
        except RuntimeError as error:
            logger.warning("forwards run without CUDA graphs, more slowly, since a capture failed: %s", error)
            self.graphs = False
            return None

    def _graph(self, blocks: Blocks, *arguments: Any) -> Callable[[], TargetOutput]:
        """Captures `static_forward` with these arguments.

        Source: PyTorch's notes on CUDA graphs: warm up on another stream, which also compiles, then capture.
        """
        here = torch.cuda.current_stream(self.device)
        self._aside = aside = self._aside or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        pool, graph = blocks.pool or torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        aside.wait_stream(here)
        # Around the capture as well: one that fails leaves its own stream the current one.
        with torch.cuda.stream(aside):
            for _ in range(2):
                self._forward(*arguments)
            # A server's other threads may allocate meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                out = self._forward(*arguments)
        here.wait_stream(aside)
        blocks.pool = pool

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
