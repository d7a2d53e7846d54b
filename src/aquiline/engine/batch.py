"""Continuous batching: requests occupy slots, leave them when they finish, and share prompt prefixes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from aquiline.cache import copy_prefix, truncate
from aquiline.decode import PREFILL_CHUNK, StepResult, free, new_state, prefill, step
from aquiline.engine.emission import Emission
from aquiline.engine.request import Engine, StreamEvent
from aquiline.engine.text import common_prefix

MIN_SHARED = 8
"""Common prefixes shorter than this are recomputed: copying them saves no time."""

_HEADROOM = 1024
"""New tokens that fit into a new cache before it grows."""


@dataclass(eq=False)
class _Prefill:
    row: int
    emission: Emission
    pieces: Iterator[StepResult | None]


class Batch:
    """Slots, the requests in them, and the requests that wait for one.

    A vacated slot keeps its keys and values until another request takes it. Of a prompt that shares a prefix with any
    slot, running or vacated, only the rest is computed. A request that fails (its processor raises, memory runs out)
    does not affect the others.

    Args:
        rows: number of slots, ≥ 1.
        capacity: positions to allocate per slot; grows if needed.
    """

    def __init__(self, engine: Engine, rows: int, capacity: int) -> None:
        self.engine = engine
        with engine.lock, torch.inference_mode():
            self.state = new_state(engine.target, engine.drafter, rows, capacity)
        self._waiting: deque[Emission] = deque()
        self._running: dict[int, Emission] = {}
        self._prefill: _Prefill | None = None
        self._held: list[list[int]] = [[] for _ in range(rows)]
        self._started: dict[int, dict[str, float]] = {}
        self._left = [0] * rows  # when a request last left the slot, counted in departures
        self._departures = 0

    @property
    def busy(self) -> bool:
        """True while requests run or wait."""
        return bool(self._waiting or self._running or self._prefill)

    @property
    def occupied(self) -> int:
        """Slots with a running request."""
        return sum(row is not None for row in self.state.occupants)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def submit(self, emission: Emission) -> None:
        """Queues a request."""
        self._waiting.append(emission)

    def cancel(self, emission: Emission) -> None:
        """Drops a request; the content of its slot stays for prompts with a common prefix."""
        if emission in self._waiting:
            self._waiting.remove(emission)
        elif self._prefill is not None and self._prefill.emission is emission:
            self._leave(self._prefill.row)
            self._prefill = None
        else:
            for row in [row for row, running in self._running.items() if running is emission]:
                self._leave(row)

    def advance(self) -> Iterator[StreamEvent]:
        """Runs at most one chunk of a prompt, then one step of the running rows, and yields the events.

        A request whose own processors raise ends alone, with the error in its last event. If memory runs out,
        the newest request ends so. If anything else raises, the slots are cleared, and the batch remains usable.
        """
        for unit in (self._prefill_some, self._step):
            try:
                with self.engine.lock, torch.inference_mode():
                    events = unit()
            except BaseException as error:
                refused = self._without_newest(error) if out_of_memory(error) else None
                if refused is None:
                    self.clear()
                    raise
                events = [refused]
            yield from events

    def clear(self) -> None:
        """Drops all requests and the content of the slots."""
        self._waiting.clear()
        self._running.clear()
        self._prefill = None
        self._started.clear()
        with self.engine.lock, torch.inference_mode():
            for row in range(len(self._held)):
                self._held[row] = []
                free(self.engine.drafter, self.state, row)

    def drop_requests(self) -> None:
        """Drops all requests, but keeps the content of the slots for prompts with a common prefix."""
        started = [*self._running.values()] + ([self._prefill.emission] if self._prefill else [])
        for emission in [*self._waiting, *started]:
            self.cancel(emission)

    def _without_newest(self, error: BaseException) -> StreamEvent | None:
        """Ends the newest request after `error`; None if the others cannot continue."""
        state, newest = self.state, self._prefill
        row = next(reversed(self._running), None) if newest is None else newest.row
        # A step that failed before it chose a token can be repeated without the row.
        if row is None or not all(emission.settled for emission in self._running.values()):
            return None
        emission = self._running[row] if newest is None else newest.emission
        self.cancel(emission)
        self._held[row] = []
        with self.engine.lock, torch.inference_mode():
            free(self.engine.drafter, state, row)
        event = emission.take(error=MemoryError(f"memory ran out: {error}"))
        return replace(event, output=emission.output())

    # -- prompts ----------------------------------------------------------------------------

    def _prefill_some(self) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        budget = PREFILL_CHUNK
        while budget > 0:
            job = self._prefill = self._prefill or self._admit()
            if job is None:
                break
            before = int(self.state.cache.lengths[job.row])
            result = next(job.pieces)
            budget -= int(self.state.cache.lengths[job.row]) - before
            if result is not None:
                self._prefill = None
                self._running[job.row] = job.emission
                events.append(self._emit(job.row, result))
        return events

    def _admit(self) -> _Prefill | None:
        """Assigns the next request to a free slot and reuses the longest cached prefix of its prompt."""
        vacant = [row for row, occupant in enumerate(self.state.occupants) if occupant is None]
        if not self._waiting or not vacant:
            return None
        emission = self._waiting.popleft()
        source, shared = self._longest_shared(emission.prompt)
        row = self._slot_for(source, shared, vacant)
        emission.cached = shared
        self._started[row] = dict(self.state.stats.seconds)
        if shared and row == source:
            self._keep(row, shared)
        else:
            self._keep(row, 0)
            if shared:
                self._copy(source, row, shared)
        self._held[row] = emission.prompt
        engine = self.engine
        pieces = prefill(
            engine.target, engine.drafter, self.state, row, emission.occupant, keep_logits=emission.wants_logits
        )
        return _Prefill(row, emission, pieces)

    def _slot_for(self, source: int, shared: int, vacant: Sequence[int]) -> int:
        """Returns an empty slot or the one left longest ago; the source itself if that loses little."""
        lengths = self.state.cache.lengths.tolist()
        if shared and source in vacant and 2 * shared >= lengths[source]:
            return source
        return min(vacant, key=lambda slot: (lengths[slot] > 0, self._left[slot], slot))

    def _longest_shared(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Returns the slot with the longest prefix of `prompt`, and the number of positions to keep.

        That is one less than the number of common tokens, because a drafter's entry for a position
        needs the token after it.
        """
        best, source = 0, 0
        for row, occupant in enumerate(self.state.occupants):
            tokens = self._held[row] if occupant is None else occupant.tokens
            common = common_prefix(tokens, prompt) - 1
            shared = min(common, int(self.state.cache.lengths[row]))
            if shared > best:
                best, source = shared, row
        return source, best if best >= MIN_SHARED else 0

    def _keep(self, row: int, positions: int) -> None:
        """Truncates a vacant slot to its first `positions` positions."""
        truncate(self.state.cache, row, positions)
        if self.engine.drafter is not None:
            self.engine.drafter.reset(row, positions + 1 if positions else 0, self.state.drafter_state)

    def _copy(self, source: int, row: int, positions: int) -> None:
        copy_prefix(self.state.cache, source, row, positions)
        if self.engine.drafter is not None:
            self.engine.drafter.copy(source, row, positions + 1, self.state.drafter_state)

    # -- steps ------------------------------------------------------------------------------

    def _step(self) -> list[StreamEvent]:
        if not self._running:
            return []
        engine, rows = self.engine, sorted(self._running)
        jobs = [self._running[row] for row in rows]
        results = step(
            engine.target,
            engine.drafter,
            self.state,
            rows,
            max_depth=max(job.remaining for job in jobs) - 1,
            keep_logits=any(job.wants_logits for job in jobs),
            lossy=engine.lossy,
        )
        with self.state.stats.timed("other"):
            for result in results:
                engine.watch.record(result.judged)
            return [self._emit(result.slot, result) for result in results]

    def _emit(self, row: int, result: StepResult) -> StreamEvent:
        emission = self._running[row]
        event = emission.take(result.logits, result.sources, result.error)
        if event.finish_reason is None:
            return event
        before = self._started[row]
        seconds = {k: s - before.get(k, 0.0) for k, s in self.state.stats.seconds.items()}
        emission.occupant.stats.seconds = seconds
        self._leave(row)
        if result.error is not None:
            self._held[row] = []
            free(self.engine.drafter, self.state, row)
        return replace(event, output=emission.output())

    def _leave(self, row: int) -> None:
        occupant = self.state.occupants[row]
        assert occupant is not None
        self._held[row] = occupant.tokens
        self.state.occupants[row] = None
        self._running.pop(row, None)
        self._started.pop(row, None)
        self._departures += 1
        self._left[row] = self._departures


def out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, on the CPU or a GPU."""
    words = ("not enough memory", "out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in words)
    )


def capacity_for(emissions: Sequence[Emission]) -> int:
    """Returns the positions to allocate per slot for a batch of these requests."""
    return max(len(e.prompt) + min(e.remaining, _HEADROOM) for e in emissions)
