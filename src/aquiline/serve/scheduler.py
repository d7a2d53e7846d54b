"""Runs the loop for all requests in one thread, and delivers what each step emits."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aquiline.engine.batch import Batch, capacity_for, out_of_memory
from aquiline.engine.emission import Emission
from aquiline.engine.logprobs import prompt_logprobs
from aquiline.engine.request import Engine, GenerationOutput, StreamEvent
from aquiline.serve.metrics import Metrics, Seen

logger = logging.getLogger("aquiline")

_CAPACITY = 1024
"""Positions that a slot has at first; the cache grows where a request needs more."""


class Busy(Exception):
    """The queue is full; the client may retry later."""


@dataclass(frozen=True, eq=False)
class PromptScores:
    """Log-probabilities of a prompt's tokens, the first excepted; see `prompt_logprobs`."""

    index: int
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]


Delivery = StreamEvent | PromptScores | Exception
"""A message to a job. An exception ends it."""


@dataclass(eq=False)
class Job:
    """The outputs of one HTTP request.

    Attributes:
        emissions: at least one; their indices come from `Scheduler.next_index`.
        deliver: receives the deliveries, in the worker's thread.
        deadline: `time.monotonic()` at which the job is given up.
        score: alternatives to report with the prompts' log-probabilities; None: do not compute them.
        store: `Scheduler.keep` receives its outputs.
    """

    emissions: Sequence[Emission]
    deliver: Callable[[Delivery], None]
    deadline: float = float("inf")
    score: int | None = None
    store: bool = True
    submitted: float = field(default_factory=time.monotonic)


class Scheduler:
    """Runs jobs on one engine in one thread: requests join and leave at every step.

    Args:
        engine: the engine; its `max_rows` requests decode at once.
        max_queue: outputs that may wait for a slot, ≥ 0.
        model: name of the model in the metrics.

    Attributes:
        keep: receives each output that finished without an error and whose job allows it, in the worker's thread.
    """

    def __init__(self, engine: Engine, max_queue: int, model: str) -> None:
        self.engine, self.limit = engine, engine.max_rows + max_queue
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0
        self._indices = itertools.count()
        self._jobs: dict[Job, set[Emission]] = {}
        self._places: dict[tuple[int, int], tuple[Job, Seen]] = {}
        self._scoring: deque[tuple[Job, int, Iterator[Any]]] = deque()
        self._batch: Batch | None = None
        self._stopping = False
        self.keep: Callable[[GenerationOutput], None] | None = None
        self.metrics = Metrics(model, engine.max_rows, lambda: self.running, lambda: self.waiting, engine.watch)
        self._thread = threading.Thread(target=self._run, name="aquiline-scheduler", daemon=True)

    @property
    def running(self) -> int:
        """Requests that are in a slot."""
        return 0 if self._batch is None else self._batch.occupied

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return max(0, self._open - self.running)

    def next_index(self) -> int:
        """Returns a number for the emissions of one prompt, unique while the server runs."""
        return next(self._indices)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step; running jobs receive an error."""
        self._commands.put(self._stop)
        self._thread.join()

    def submit(self, job: Job) -> None:
        """Queues a job.

        Raises:
            Busy: if the queue is full.
        """
        with self._lock:
            if self._open + len(job.emissions) > self.limit:
                raise Busy(f"{self._open} requests run or wait; allowed: {self.limit}; send it again later")
            self._open += len(job.emissions)
        self._commands.put(lambda: self._admit(job))

    def cancel(self, job: Job) -> None:
        """Frees a job's slots before the next step; ignores a job that has ended."""
        self._commands.put(lambda: self._drop(job))

    # -- in the worker's thread ----------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._obey()
                self._expire()
                if self._scoring:
                    self._score()
                if self._batch is not None and self._batch.busy:
                    for event in self._batch.advance():
                        self._deliver(event)
            except Exception as error:
                logger.exception("a step failed; the requests that ran are ended")
                self._end_all(error if out_of_memory(error) else RuntimeError("the server failed in a step"))

    def _obey(self) -> None:
        """Runs the queued commands; waits for one while idle."""
        idle = not self._scoring and (self._batch is None or not self._batch.busy)
        try:
            while True:
                self._commands.get(block=idle and not self._stopping)()
                idle = False
        except queue.Empty:
            return

    def _admit(self, job: Job) -> None:
        self._jobs[job] = set(job.emissions)
        for emission in job.emissions:
            self._places[emission.index, emission.sample] = (job, Seen(emission, job.submitted))
        if job.score is None:
            self._queue(job)
            return
        prompts = {emission.index: emission.prompt for emission in job.emissions}
        for index, prompt in prompts.items():
            self._scoring.append((job, index, prompt_logprobs(self.engine, prompt, job.score)))

    def _queue(self, job: Job) -> None:
        for emission in job.emissions:
            if emission.finish_reason is not None:  # max_tokens is 0
                output = emission.output()
                self._deliver(StreamEvent(emission.index, [], "", "length", output, emission.sample))
                continue
            if self._batch is None:
                capacity = max(capacity_for([emission]), min(_CAPACITY, self.engine.target.shape.max_positions))
                self._batch = Batch(self.engine, self.engine.max_rows, capacity)
            self._batch.submit(emission)

    def _score(self) -> None:
        job, index, chunks = self._scoring[0]
        try:
            found = next(chunks)
        except Exception as error:  # noqa: BLE001 - any error ends this job alone
            self._drop(job, error)
            return
        if found is None:
            return
        self._scoring.popleft()
        job.deliver(PromptScores(index, *found))
        if not any(waiting is job for waiting, _, _ in self._scoring):
            self._queue(job)

    def _deliver(self, event: StreamEvent) -> None:
        found = self._places.get((event.index, event.sample))
        if found is None:
            return  # dropped between two events of one step
        job, seen = found
        if event.error is not None:
            self._drop(job, event.error)
            return
        if event.token_ids:
            if seen.last is None:
                self.metrics.began(seen.emission)
            self.metrics.stepped(seen, event)
        if event.output is not None:
            self.metrics.finished(seen, event.output.finish_reason)
            if job.store and self.keep is not None:
                self.keep(event.output)
        job.deliver(event)
        if event.output is not None:
            self._close(job, seen.emission)

    def _close(self, job: Job, emission: Emission) -> None:
        del self._places[emission.index, emission.sample]
        self._jobs[job].discard(emission)
        with self._lock:
            self._open -= 1
        if not self._jobs[job]:
            del self._jobs[job]

    def _drop(self, job: Job, error: Exception | None = None) -> None:
        """Ends the rest of a job, and delivers the error if there is one."""
        for emission in list(self._jobs.get(job, ())):
            if self._batch is not None:
                self._batch.cancel(emission)
            self.metrics.count(self._places[emission.index, emission.sample][1])
            self._close(job, emission)
            if error is not None:
                job.deliver(error)
                error = None
        self._scoring = deque(entry for entry in self._scoring if entry[0] is not job)

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._jobs if job.deadline <= now]:
            self._drop(job, TimeoutError(f"not finished after {job.deadline - job.submitted:.0f} s"))

    def _end_all(self, error: Exception) -> None:
        self._batch = None  # its memory may be what was missing; the next request makes another one
        for job in list(self._jobs):
            self._drop(job, error)

    def _stop(self) -> None:
        self._stopping = True
        self._end_all(RuntimeError("the server is shutting down"))
