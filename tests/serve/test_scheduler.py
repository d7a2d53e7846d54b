"""The worker: many requests at once, those that leave, and those that fail."""

from __future__ import annotations

import gc
import http.client
import json
import random
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst
from aquiline.drafters.trees import Chain
from aquiline.engine.batch import Batch
from aquiline.engine.emission import Emission
from aquiline.engine.generate import generate_requests
from aquiline.engine.grammar import regex
from aquiline.engine.request import GenerationOutput, Request, StreamEvent
from aquiline.loading import Loaded
from aquiline.sampling import SamplingParams
from aquiline.serve.scheduler import Delivery, Job, Scheduler
from aquiline.targets.target import TargetInput, TargetOutput
from tests import tiny
from tests.serve.serving import Running, loaded, path_model, serving
from tests.tiny_tokenizers import every_byte

TEXT = "/v1/completions"


@dataclass(eq=False)
class Client:
    """Collects what a job receives."""

    scheduler: Scheduler
    request: Request
    events: list[Delivery] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        seed = self.request.params.seed or 0
        self.emission = Emission(self.scheduler.engine, self.request, self.scheduler.next_index(), 0, seed)
        self.job = Job([self.emission], self.take)

    def send(self) -> Client:
        self.scheduler.submit(self.job)
        return self

    def take(self, delivery: Delivery) -> None:
        self.events.append(delivery)
        last = isinstance(delivery, StreamEvent) and (delivery.output or delivery.error)
        if last or isinstance(delivery, Exception):
            self.ended.set()

    def output(self) -> GenerationOutput:
        assert self.ended.wait(60)
        event = self.events[-1]
        assert isinstance(event, StreamEvent) and event.output is not None, event
        return event.output

    def error(self) -> Exception | None:
        assert self.ended.wait(60)
        event = self.events[-1]
        return event if isinstance(event, Exception) else event.error if isinstance(event, StreamEvent) else None


@pytest.fixture
def scheduler() -> Any:
    made: list[Scheduler] = []

    def make(model: Loaded, max_queue: int = 64) -> Scheduler:
        made.append(Scheduler(model.engine, max_queue, "m"))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.stop()


def network_model(rows: int = 3) -> Loaded:
    """A real network with a head and prompt lookup, whose tokens are those of the tokenizer."""
    target = tiny.decoder("llama")
    head = EagleDrafter(tiny.head("eagle3"), target, Chain(3))
    return loaded(target, LookupFirst(PromptLookup(), head), rows)


def requests(count: int, seed: int, shared: int = 0) -> list[Request]:
    """Random requests, greedy and sampled, with a beginning in common."""
    rng = random.Random(seed)
    head = list(range(2, 2 + shared))
    return [
        Request(
            [*head, *(rng.randrange(2, tiny.VOCAB) for _ in range(rng.randrange(1, 30)))],
            SamplingParams(max_new_tokens=rng.randrange(1, 40), temperature=rng.choice((0, 0.8)), seed=i),
        )
        for i in range(count)
    ]


def alone(model: Loaded, request: Request) -> list[int]:
    (output,) = generate_requests(model.plain().engine, [request])
    return output.token_ids


# -- the same output whatever else happens --------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("make", [path_model, network_model])
def test_eight_clients_with_cancels_and_shared_prefixes_get_the_outputs_of_generate(make: Any, scheduler: Any) -> None:
    """Each client asks, cancels a third of its requests in mid-answer, and asks follow-ups of its own answers."""
    model = make(rows=3)
    worker, failures = scheduler(model), list[Any]()
    jobs: list[weakref.ref[Job]] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        conversation: list[int] = []
        for request in requests(6, number, shared=12):
            request = Request([*conversation, *request.tokens][:150], request.params)
            client = Client(worker, request).send()
            jobs.append(weakref.ref(client.job))
            if rng.random() < 0.33:
                time.sleep(rng.random() * 0.01)
                worker.cancel(client.job)
                continue
            output = client.output()
            if output.token_ids != alone(model, request):
                failures.append((request, output.token_ids))
            conversation = [*request.tokens, *output.token_ids] if len(request.tokens) < 100 else []

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert worker.metrics.prefix_hits._value.get() > 100, "conversations and their beginnings were reused"
    end = time.monotonic() + 10
    while worker.running or worker.waiting:  # the last cancels
        assert time.monotonic() < end
    gc.collect()
    assert sum(job() is not None for job in jobs) <= 1, "ended jobs are forgotten; the worker may name the last one"


@pytest.mark.oracle
def test_the_next_turn_forwards_only_new_tokens(scheduler: Any) -> None:
    """Another conversation in between takes another slot; the first one's is still there."""
    model = network_model(rows=2)
    worker = scheduler(model)
    first = Request(list(range(3, 60)), SamplingParams(max_new_tokens=12))
    other = Request(list(range(60, 20, -1)), SamplingParams(max_new_tokens=12))
    answers = [Client(worker, request).send().output() for request in (first, other)]
    turn = Request([*first.tokens, *answers[0].token_ids, 5, 6, 7], SamplingParams(max_new_tokens=12))
    client = Client(worker, turn).send()
    assert client.output().token_ids == alone(model, turn)
    # One position less than what is common: a drafter needs the token after it.
    assert client.emission.cached >= len(first.tokens) + len(answers[0].token_ids) - 2


def test_the_slot_left_longest_ago_is_given_up() -> None:
    model = path_model(rows=2)
    batch = Batch(model.engine, 2, 64)

    def run(tokens: list[int]) -> Emission:
        emission = Emission(model.engine, Request(tokens, SamplingParams(max_new_tokens=3, ignore_eos=True)), 0, 0, 0)
        batch.submit(emission)
        while batch.busy:
            list(batch.advance())
        return emission

    a, b, c = ([20 * i + j for j in range(2, 20)] for i in range(3))
    run(a)
    run(b)
    assert run([*a, 9]).cached > 10, "a is younger than b now"
    run(c)
    assert run([*a, 9]).cached > 10 and run([*c, 9]).cached > 10
    assert run([*b, 9]).cached == 0


def test_a_short_common_beginning_does_not_cost_a_long_conversation_its_slot() -> None:
    model = path_model(rows=2)
    batch = Batch(model.engine, 2, 64)
    system = list(range(2, 14))
    cached = []
    for tokens in ([*system, *range(20, 80)], [*system, 99], [*system, *range(20, 80), 4]):
        emission = Emission(model.engine, Request(tokens, SamplingParams(max_new_tokens=2, ignore_eos=True)), 0, 0, 0)
        batch.submit(emission)
        while batch.busy:
            list(batch.advance())
        cached.append(emission.cached)
    assert cached[0] == 0 and cached[1] == len(system) - 1 and cached[2] >= len(system) + 59


# -- clients that leave -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot_within_a_step(stream: bool) -> None:
    model = path_model(rows=1, delay=0.02)
    with serving(model) as running:
        body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": stream}
        connection = http.client.HTTPConnection("127.0.0.1", running.port)
        connection.request("POST", TEXT, json.dumps(body), {"Content-Type": "application/json"})
        running.until(lambda: running.scheduler.running == 1 and len(model.target.widths) > 5)
        if stream:
            connection.getresponse().read(10)
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        running.until(lambda: running.scheduler.running == 0)
        before = len(model.target.widths)
        status, _, answer = running.ask(TEXT, {"prompt": "y", "max_tokens": 2, "ignore_eos": True})
        assert status == 200 and len(answer["choices"][0]["text"]) > 0
        assert len(model.target.widths) <= before + 3, "the request that left takes no more steps"


def test_a_cancel_takes_effect_before_the_next_step(scheduler: Any) -> None:
    model = path_model(rows=1, delay=0.01)
    worker = scheduler(model)
    client = Client(worker, Request([5, 6], SamplingParams(max_new_tokens=900, ignore_eos=True))).send()
    while len(client.events) < 3:
        time.sleep(0.001)
    steps = len(model.target.widths)
    worker.cancel(client.job)
    after = Client(worker, Request([7, 8], SamplingParams(max_new_tokens=1))).send()
    after.output()
    assert len(model.target.widths) <= steps + 2, "at most the step under way, and the other one's prompt"
    stats, metrics = client.emission.occupant.stats, worker.metrics
    counted = sum(metrics.forwards.labels("m", on)._value.get() for on in ("on", "off"))
    assert counted == stats.steps > 0, "the steps of a request that left are counted"
    assert metrics.drafts._value.get() == stats.drafted > 0 and metrics.draft_tokens._value.get() == stats.nodes


# -- requests that fail -------------------------------------------------------------------------------


class Raises:
    """A processor that raises at its `at`-th call."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise LookupError("no such thing")
        return scores


@pytest.mark.parametrize("at", [0, 1, 7])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_raising_processor_harms_nobody_else(at: int, temperature: float, scheduler: Any) -> None:
    model = network_model()
    worker = scheduler(model)
    good = requests(5, 1)
    bad = SamplingParams(max_new_tokens=30, temperature=temperature, logits_processors=(Raises(at),))
    clients = [Client(worker, request).send() for request in good[:3]]
    failing = Client(worker, Request([4, 5, 6], bad)).send()
    clients += [Client(worker, request).send() for request in good[3:]]
    assert isinstance(failing.error(), LookupError)
    assert [client.output().token_ids for client in clients] == [alone(model, request) for request in good]
    emitted = [token for e in failing.events if isinstance(e, StreamEvent) and not e.error for token in e.token_ids]
    whole = alone(model, Request([4, 5, 6], SamplingParams(max_new_tokens=30, temperature=temperature, seed=0)))
    assert emitted == whole[: len(emitted)] and len(emitted) <= at


def test_a_grammar_that_ends_and_one_that_bars_everything(scheduler: Any) -> None:
    """A grammar that has ended allows the end alone; with the end barred, nothing is left."""
    model = path_model()
    worker = scheduler(model)
    good = requests(3, 2)
    grammar = regex(model.engine, "ab")
    barred = SamplingParams(max_new_tokens=9, logits_processors=(grammar, lambda _, scores: scores - float("inf")))
    ended = Client(worker, Request([3], SamplingParams(max_new_tokens=9, logits_processors=(grammar,)))).send()
    stuck = Client(worker, Request([3], barred)).send()
    clients = [Client(worker, request).send() for request in good]
    assert ended.output().text == "ab" and ended.output().finish_reason == "eos"
    assert isinstance(stuck.error(), ValueError)
    assert [client.output().token_ids for client in clients] == [alone(model, request) for request in good]


def test_memory_that_runs_out_refuses_the_newest(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = path_model()
    worker = scheduler(model)
    long = Request([2] * 200, SamplingParams(max_new_tokens=2))
    good = requests(2, 3)
    forward = model.target.forward

    def limited(inputs: TargetInput) -> TargetOutput:
        if inputs.tokens.shape[1] >= 200:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return forward(inputs)

    monkeypatch.setattr(model.target, "forward", limited)
    clients = [Client(worker, request).send() for request in good]
    refused = Client(worker, long).send()
    assert isinstance(refused.error(), MemoryError)
    assert [client.output().token_ids for client in clients] == [alone(model, request) for request in good]


def test_memory_that_runs_out_in_a_step_refuses_the_newest_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = path_model()
    batch = Batch(model.engine, 3, 64)
    todo = [Request([3, 4 + i], SamplingParams(max_new_tokens=12, ignore_eos=True)) for i in range(3)]
    emissions = [Emission(model.engine, request, i, 0, 0) for i, request in enumerate(todo)]
    for emission in emissions:
        batch.submit(emission)
    forward, widest = model.target.forward, 2

    def limited(inputs: TargetInput) -> TargetOutput:
        if inputs.tokens.shape[0] > widest:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(inputs)

    monkeypatch.setattr(model.target, "forward", limited)
    events = []
    while batch.busy:
        events += list(batch.advance())
    assert [event.index for event in events if isinstance(event.error, MemoryError)] == [2]
    outputs = {event.index: event.output.token_ids for event in events if event.output and not event.error}
    assert outputs == {i: alone(model, todo[i]) for i in (0, 1)}


def test_a_broken_step_ends_running_requests_and_the_server_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    model = path_model()
    with serving(model) as running:
        with monkeypatch.context() as patch:

            def broken(*_: Any) -> Any:
                raise RuntimeError("a bug at /some/path")

            patch.setattr(model.target, "forward", broken)
            status, _, answer = running.ask(TEXT, {"prompt": "x"})
            assert status == 500 and "path" not in str(answer)
        assert running.ask(TEXT, {"prompt": "x"})[0] == 200


@pytest.mark.parametrize(("error", "status"), [(MemoryError(), 503), (OSError("a bug"), 500)])
def test_slots_that_cannot_be_made_refuse_the_request_and_the_server_continues(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(path_model()) as running:
        with monkeypatch.context() as patch:

            def broken(*_: Any) -> Any:
                raise error

            patch.setattr("aquiline.serve.scheduler.Batch", broken)
            assert running.ask(TEXT, {"prompt": "x"})[0] == status
        assert running.ask(TEXT, {"prompt": "x"})[0] == 200


# -- what is measured ---------------------------------------------------------------------------------


def values(running: Running) -> dict[str, float]:
    text = running.ask("/metrics")[2]
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name.replace('model_name="tiny"', ""): float(value) for name, value in (line.split(" ") for line in lines)}


def test_metrics_have_vllms_names_and_add_up() -> None:
    with serving(path_model()) as running:
        body = {"prompt": "count this", "max_tokens": 50, "temperature": 0, "ignore_eos": True, "provenance": True}
        answers = [running.ask(TEXT, body)[2] for _ in range(2)]
        running.ask(TEXT, body | {"speculation": {"draft": "none"}})
        running.ask(TEXT, {"prompt": ""})
        found = values(running)
        pieces = [piece for answer in answers for piece in answer["choices"][0]["provenance"]]
        assert found["vllm:generation_tokens_total{}"] == 150 and found["vllm:prompt_tokens_total{}"] == 30
        assert found["vllm:prefix_cache_hits_total{}"] == 18, "all but the last of 10 tokens, twice"
        accepted = sum(len(piece["token_ids"]) for piece in pieces if piece["source"] == "head")
        assert found["vllm:spec_decode_num_accepted_tokens_total{}"] == accepted
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        by_place = [value for key, value in found.items() if key.startswith(name)]
        assert sum(by_place) == accepted and by_place == sorted(by_place, reverse=True)
        assert found['vllm:request_success_total{finished_reason="length",}'] == 3
        for name in ("time_to_first_token", "e2e_request_latency"):
            assert found[f"vllm:{name}_seconds_count{{}}"] == 3
        assert found['aquiline:row_steps_total{drafting="off",}'] >= 49
        assert found['aquiline:requests_refused_total{,status="400"}'] == 1
        drafted, plain = (found[f'aquiline:row_steps_total{{drafting="{on}",}}'] for on in ("on", "off"))
        assert found["aquiline:mean_accept_length{}"] == pytest.approx(1 + accepted / (drafted + plain))
        assert found["vllm:num_requests_running{}"] == found["vllm:num_requests_waiting{}"] == 0
        rates = [value for key, value in found.items() if key.startswith("aquiline:acceptance{")]
        health = running.ask("/health")[2]
        assert rates == health["acceptance"]["head"] and 0 < rates[0] < 1 and health["alarms"] == []


def test_an_alarm_is_a_metric_and_a_field_of_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aquiline.engine.watch.BLOCK", 2)
    with serving(path_model()) as running:
        watch = running.server._parts()[0].watch
        for accepted in (True, False):
            for _ in range(100):
                watch.record([("head", accepted)])
        assert values(running)['aquiline:acceptance_alarms_total{method="head",}'] == 1
        (alarm,) = running.ask("/health")[2]["alarms"]
        assert alarm["method"] == "head" and alarm["position"] == 0 and alarm["before"] == 1


def test_the_tokenizer_holds_all_tokens_of_the_networks() -> None:
    """The tests above rely on it: every token of the tiny networks has a text."""
    assert len(every_byte()) >= tiny.VOCAB
