"""Exports counters and latencies under vLLM's names, for dashboards made for vLLM."""

from __future__ import annotations

import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aquiline.engine.emission import Emission
from aquiline.engine.request import StreamEvent
from aquiline.engine.watch import Watch
from aquiline.stats import GenerationStats

_WINDOW = 10.0
"""Seconds that the rate of tokens looks back."""

_EVERY = 1.0
"""Seconds after which the counters of a running output are brought up to date: once a step would slow the steps."""

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.3, 2.5, 5, 10, 20, 40, 80, 160)


class Metrics:
    """The metrics of one server.

    Args:
        model: name in the label `model_name`.
        slots: requests that can decode at once.
        running: returns the requests that are in a slot.
        waiting: returns those that wait for one.
    """

    def __init__(
        self, model: str, slots: int, running: Callable[[], int], waiting: Callable[[], int], watch: Watch
    ) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        self._model, made = model, self._made
        self.prompt_tokens = made(Counter, "vllm:prompt_tokens", "Prompt tokens.")
        self.generation_tokens = made(Counter, "vllm:generation_tokens", "Emitted tokens.")
        self.success = made(Counter, "vllm:request_success", "Finished outputs.", ["finished_reason"])
        self.drafts = made(Counter, "vllm:spec_decode_num_drafts", "Steps that drafted, counted per row.")
        self.draft_tokens = made(Counter, "vllm:spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted = made(Counter, "vllm:spec_decode_num_accepted_tokens", "Accepted drafts.")
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        self.accepted_at = made(Counter, name, "Accepted drafts by depth, from 0.", ["position"])
        self.prefix_queries = made(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked for in the slots.")
        self.prefix_hits = made(Counter, "vllm:prefix_cache_hits", "Prompt tokens that a slot held already.")
        self.first_token = made(Histogram, "vllm:time_to_first_token_seconds", "Queue and prefill.", buckets=_SECONDS)
        name = "vllm:inter_token_latency_seconds"
        self.between = made(Histogram, name, "Seconds per emitted token after the first.", buckets=_SECONDS)
        self.whole = made(Histogram, "vllm:e2e_request_latency_seconds", "Whole request.", buckets=_SECONDS)
        self.forwards = made(Counter, "aquiline:row_steps", "Steps, counted per row.", ["drafting"])
        self.tokens_by_source = made(Counter, "aquiline:emitted_tokens", "Emitted tokens by origin.", ["source"])
        self.offered_at = made(Counter, "aquiline:offered_per_pos", "Steps with a draft at this depth.", ["position"])
        self.refused = made(Counter, "aquiline:requests_refused", "Requests that were not run.", ["status"])
        name = "aquiline:acceptance"
        self.acceptance = made(Gauge, name, "Running n-α by what drafted.", ["method", "position"])
        self.alarms = made(Counter, "aquiline:acceptance_alarms", "Falls of acceptance.", ["method"])
        self._watch, self._raised = watch, dict[str, int]()
        rate = f"Emitted tokens per second of the last {_WINDOW:.0f} s."
        self.gauge("vllm:num_requests_running", "Requests in a slot.", running)
        self.gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", waiting)
        self.gauge("aquiline:slots", "Slots.", lambda: slots)
        self.gauge("aquiline:mean_accept_length", "Tokens per target forward.", self._tau)
        self.gauge("aquiline:tokens_per_second", rate, self._rate)
        self._steps = self._accepted = 0
        self._recent: deque[tuple[float, int]] = deque()

    def _made(self, kind: Any, name: str, text: str, labels: Sequence[str] = (), **more: Any) -> Any:
        found = kind(name, text, ["model_name", *labels], registry=self.registry, **more)
        return found if labels else found.labels(model_name=self._model)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Adds a gauge whose value is read whenever the metrics are."""
        from prometheus_client import Gauge

        self._made(Gauge, name, text).set_function(read)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        for method, rates in self._watch.rates.items():
            for position, rate in enumerate(rates):
                self.acceptance.labels(model_name=self._model, method=method, position=str(position)).set(rate)
            raised = self._watch.raised.get(method, 0)
            self.alarms.labels(model_name=self._model, method=method).inc(raised - self._raised.get(method, 0))
            self._raised[method] = raised
        return bytes(generate_latest(self.registry))

    def began(self, emission: Emission) -> None:
        """Counts the prompt of a request that got its first token."""
        self.prompt_tokens.inc(len(emission.prompt))
        self.prefix_queries.inc(len(emission.prompt))
        self.prefix_hits.inc(emission.cached)

    def stepped(self, seen: Seen, event: StreamEvent) -> None:
        """Records a step's latency and tokens; counts the rest of what it did within `_EVERY` seconds.

        Args:
            event: at least one token.
            seen: what was counted of the output before; updated.
        """
        now, tokens = time.monotonic(), len(event.token_ids)
        if seen.last is None:
            self.first_token.observe(now - seen.submitted)
        else:
            for _ in range(tokens):
                self.between.observe((now - seen.last) / tokens)
        seen.last = now
        self.generation_tokens.inc(tokens)
        self._recent.append((now, tokens))
        while self._recent[0][0] < now - _WINDOW:
            self._recent.popleft()
        if now - seen.counted >= _EVERY:
            self.count(seen)

    def count(self, seen: Seen) -> None:
        """Counts what the steps of an output did since it was last counted."""
        stats, before = seen.emission.occupant.stats, seen.stats
        steps, drafted = stats.steps - before.steps, stats.drafted - before.drafted
        for drafting, count in (("on", drafted), ("off", steps - drafted)):
            self.forwards.labels(model_name=self._model, drafting=drafting).inc(count)
        self.drafts.inc(drafted)
        self.draft_tokens.inc(stats.nodes - before.nodes)
        self.accepted.inc(stats.accepted - before.accepted)
        for counter, counts, old in (
            (self.accepted_at, stats.accepted_at, before.accepted_at),
            (self.offered_at, stats.offered_at, before.offered_at),
        ):
            for depth, (new, was) in enumerate(itertools.zip_longest(counts, old, fillvalue=0)):
                counter.labels(model_name=self._model, position=str(depth)).inc(new - was)
        for source, added in (stats.sources - before.sources).items():
            self.tokens_by_source.labels(model_name=self._model, source=source).inc(added)
        self._steps += steps
        self._accepted += stats.accepted - before.accepted
        seen.stats, seen.counted = copy.deepcopy(stats), time.monotonic()

    def finished(self, seen: Seen, reason: str) -> None:
        """Counts an output that ended by itself."""
        self.count(seen)
        self.success.labels(model_name=self._model, finished_reason="length" if reason == "length" else "stop").inc()
        self.whole.observe(time.monotonic() - seen.submitted)

    def refuse(self, status: int) -> None:
        """Counts a request that was answered with an error."""
        self.refused.labels(model_name=self._model, status=str(status)).inc()

    def _tau(self) -> float:
        return 1 + self._accepted / self._steps if self._steps else 0.0

    def _rate(self) -> float:
        start = time.monotonic() - _WINDOW
        return sum(count for at, count in list(self._recent) if at >= start) / _WINDOW


class Seen:
    """What was counted of one output.

    Args:
        submitted: `time.monotonic()` when its request arrived.
    """

    def __init__(self, emission: Emission, submitted: float) -> None:
        self.emission, self.submitted, self.stats = emission, submitted, GenerationStats()
        self.last: float | None = None  # when a step last emitted
        self.counted = submitted
