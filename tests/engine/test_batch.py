"""Many requests at once: slots, shared beginnings, interleaved streams, interruptions, threads."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from aquiline.cache import KVCache
from aquiline.decode import PREFILL_CHUNK
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import Merged
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import DynamicTree
from aquiline.engine import generate
from aquiline.engine.batch import MIN_SHARED, Batch
from aquiline.engine.generate import generate_requests, stream_requests
from aquiline.engine.request import Engine, Request, StreamEvent
from aquiline.sampling import SamplingParams
from aquiline.targets.decoder import Decoder, config_from_hf
from tests import tiny
from tests.knowing_drafter import KnowingDrafter
from tests.path_target import PathTarget

VOCABULARY = 50
BOTH = pytest.mark.parametrize("speculative", [False, True])


def engine(speculative: bool, context: int = 256, **settings: Any) -> Engine:
    target = PathTarget(VOCABULARY, context)

    def known(prefix: Sequence[int]) -> list[int]:
        text = list(prefix)
        for _ in range(4):
            text.append(int(target.logits(text).argmax()))
        return text[len(prefix) :]

    drafter = KnowingDrafter(known, VOCABULARY) if speculative else None
    return Engine(target, drafter, None, (0,), **settings)


def widths(engine: Engine) -> list[tuple[int, int]]:
    assert isinstance(engine.target, PathTarget)
    return engine.target.widths


def requests(count: int, *, seed: int = 0, longest: int = 20, **settings: Any) -> list[Request]:
    settings = {"temperature": 0.8} | settings
    prompts = torch.randint(1, VOCABULARY, (count, longest), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        Request(prompt[: 2 + 3 * i % (longest - 1)], SamplingParams(max_new_tokens=5 + 2 * i, seed=i, **settings))
        for i, prompt in enumerate(prompts)
    ]


def ids(outputs: Sequence[generate.GenerationOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    made: list[Batch] = []

    def recorded(*args: Any) -> Batch:
        made.append(Batch(*args))
        return made[-1]

    monkeypatch.setattr(generate, "Batch", recorded)
    return made


def assert_free(batches: Sequence[Batch]) -> None:
    for batch in batches:
        assert batch.occupied == 0 and not batch.busy
        assert not batch.state.cache.lengths.any()


# -- slots -------------------------------------------------------------------------------------


@pytest.mark.oracle
@BOTH
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_an_output_is_independent_of_the_rest_of_the_batch(speculative: bool, rows: int) -> None:
    todo = requests(9)
    alone = [ids(generate_requests(engine(False), [request]))[0] for request in todo]
    assert ids(generate_requests(engine(speculative, max_rows=rows), todo)) == alone
    backwards = generate_requests(engine(speculative, max_rows=rows), todo[::-1])
    assert ids(backwards) == alone[::-1]


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_same_with_a_network(dtype: torch.dtype) -> None:
    target = tiny.decoder("llama", dtype)
    drafter = EagleDrafter(tiny.head("eagle3", dtype=dtype), target, DynamicTree(8, 3, 3))
    todo = [
        Request(prompt, SamplingParams(max_new_tokens=8 + 3 * i, temperature=0.7, seed=i))
        for i, prompt in enumerate(tiny.prompts(5))
    ]
    alone = [ids(generate_requests(Engine(target, None, None, ()), [request]))[0] for request in todo]
    assert ids(generate_requests(Engine(target, drafter, None, (), max_rows=3), todo)) == alone


def test_waiting_requests_take_the_slots_of_finished_ones() -> None:
    made = engine(False, max_rows=2)
    counts = [3, 20, 4, 5, 6]
    todo = [Request([9, 9 + i], SamplingParams(max_new_tokens=c, ignore_eos=True)) for i, c in enumerate(counts)]
    order = [event.index for event in stream_requests(made, todo) if event.output]
    assert order == [0, 2, 3, 4, 1], "short requests pass through the second slot while the long one runs"
    assert max(rows for rows, _ in widths(made)) == 2


def test_prompts_prefill_in_chunks_between_the_steps_of_others() -> None:
    made = engine(False, 4000)
    long = [1 + i % 40 for i in range(3 * PREFILL_CHUNK + 10)]
    todo = [
        Request([3, 4], SamplingParams(max_new_tokens=12, ignore_eos=True)),
        Request(long, SamplingParams(max_new_tokens=3, ignore_eos=True)),
    ]
    events = list(stream_requests(made, todo))
    assert [w for _, w in widths(made) if w > 2] == [PREFILL_CHUNK] * 3 + [10]
    first = next(i for i, event in enumerate(events) if event.index == 1)
    assert first >= 3, "the short request goes on while the long prompt is read"
    assert ids([e.output for e in events if e.output]) != []
    alone = [ids(generate_requests(engine(False, 4000), [request]))[0] for request in todo]
    assert [next(e.output for e in events if e.output and e.index == i).token_ids for i in (0, 1)] == alone


def test_short_prompts_are_read_together_before_the_first_step() -> None:
    made = engine(False)
    list(stream_requests(made, requests(4, ignore_eos=True)))
    assert widths(made)[4][0] == 4


@BOTH
def test_streaming_equals_blocking(speculative: bool) -> None:
    todo = requests(5)
    blocking = generate_requests(engine(speculative), todo)
    events = list(stream_requests(engine(speculative), todo))
    for index, output in enumerate(blocking):
        mine = [event for event in events if event.index == index]
        assert [token for event in mine for token in event.token_ids] == output.token_ids
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + [output.finish_reason]


def test_progress_sees_every_event() -> None:
    seen: list[StreamEvent] = []
    outputs = generate_requests(engine(True), requests(3), progress=seen.append)
    assert sum(len(event.token_ids) for event in seen) == sum(len(output.token_ids) for output in outputs)


# -- shared beginnings -------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_shared_system_prompt_is_computed_once(speculative: bool, rows: int) -> None:
    system = [1 + i % 40 for i in range(60)]
    todo = [
        Request([*system, 5 + i, 7], SamplingParams(max_new_tokens=4 + i, temperature=0.5, seed=i)) for i in range(6)
    ]
    made = engine(speculative, max_rows=rows)
    assert ids(generate_requests(made, todo)) == [
        ids(generate_requests(engine(False), [request]))[0] for request in todo
    ]
    assert [w for _, w in widths(made) if w > 13] == [62]


def _drafters() -> dict[str, Drafter]:
    target = tiny.decoder("llama")
    eagle = EagleDrafter(tiny.head("eagle3"), target, DynamicTree(8, 3, 3))
    return {
        "eagle3": eagle,
        "small model": SmallModel(tiny.decoder("llama-bias-tied"), target),
        "merged": Merged(eagle, PromptLookup(min_ngram=1)),
    }


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["eagle3", "small model", "merged"])
def test_a_drafter_takes_part_in_a_shared_prompt(
    name: str, monkeypatch: pytest.MonkeyPatch, batches: list[Batch]
) -> None:
    """The drafter's own cache is copied: all rows hold the prompt, read by one of them."""
    drafter, copies = _drafters()[name], []
    copy = drafter.copy
    monkeypatch.setattr(drafter, "copy", lambda *args: (copies.append(args), copy(*args)))
    made = Engine(tiny.decoder("llama"), drafter, None, ())
    prompt = list(range(3, 15))
    params = SamplingParams(max_new_tokens=10, temperature=0.7, seed=4, n=3)
    found = generate_requests(made, [Request(prompt, params)])
    assert [args[:3] for args in copies] == [(0, 1, 12), (0, 2, 12)]
    state = batches[0].state.drafter_state
    keys = (state[0] if isinstance(state, list) else state).cache.key_block
    for row in (1, 2):
        assert keys[:, 0, :, :11].any() and torch.equal(keys[:, row, :, :11], keys[:, 0, :, :11])
    for output in found:
        (alone,) = generate_requests(made, [Request(prompt, replace(params, n=1, seed=output.seed))])
        assert alone.token_ids == output.token_ids


def test_short_common_beginnings_are_not_shared() -> None:
    made = engine(False, max_rows=1)
    head = [1 + i for i in range(MIN_SHARED)]
    generate_requests(made, [Request([*head, 20 + i], SamplingParams(max_new_tokens=1)) for i in range(2)])
    assert widths(made) == [(1, MIN_SHARED + 1)] * 2


# -- streams that end early ---------------------------------------------------------------------


@BOTH
def test_interleaved_streams(speculative: bool) -> None:
    made = engine(speculative)
    todo = [requests(3, seed=1), requests(2, seed=2)]
    streams = [stream_requests(made, part) for part in todo]
    events: list[list[StreamEvent]] = [[], []]
    running = [0, 1]
    while running:
        for i in list(running):
            event = next(streams[i], None)
            if event is None:
                running.remove(i)
            else:
                events[i].append(event)
    for part, found in zip(todo, events, strict=True):
        outputs = {event.index: event.output for event in found if event.output}
        assert ids([outputs[i] for i in range(len(part))]) == ids(generate_requests(engine(False), part))


@BOTH
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_closed_stream_frees_its_slots(speculative: bool, after: int, batches: list[Batch]) -> None:
    made = engine(speculative)
    stream = stream_requests(made, requests(5, ignore_eos=True))
    for _ in range(after):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert next(stream, None) is None
    assert len(batches) == min(after, 1)
    assert_free(batches)
    assert ids(generate_requests(made, requests(2))) == ids(generate_requests(engine(False), requests(2)))


class _Interrupted:
    """A target that is interrupted in its `at`-th forward."""

    def __init__(self, inner: PathTarget, at: int, error: type[BaseException]) -> None:
        self.shape, self.dtype, self.device, self.new_cache = inner.shape, inner.dtype, inner.device, inner.new_cache
        self.inner, self.at, self.error = inner, at, error

    def forward(self, *args: Any) -> Any:
        self.at -= 1
        if self.at == 0:
            self.inner.forward(*args)  # what it wrote stays behind
            raise self.error("interrupted")
        return self.inner.forward(*args)


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_frees_the_slots_and_leaves_the_engine_usable(
    at: int, error: type[BaseException], batches: list[Batch]
) -> None:
    made = engine(True)
    target = _Interrupted(made.target, at, error)  # type: ignore[arg-type]
    broken = replace(made, target=target)  # type: ignore[arg-type]
    with pytest.raises(error, match="interrupted"):
        generate_requests(broken, requests(3, ignore_eos=True))
    assert_free(batches)
    assert ids(generate_requests(broken, requests(3))) == ids(generate_requests(engine(False), requests(3)))


def test_an_error_of_the_consumer_frees_the_slots(batches: list[Batch]) -> None:
    def fail(event: StreamEvent) -> None:
        raise LookupError("the screen is gone")

    with pytest.raises(LookupError, match="the screen is gone"):
        generate_requests(engine(True), requests(3), progress=fail)
    assert_free(batches)


# -- threads -----------------------------------------------------------------------------------


class _Guarded(PathTarget):
    """Notices two forwards at the same time."""

    inside = False

    def forward(self, *args: Any) -> Any:
        assert not self.inside, "two threads are in the target at once"
        self.inside = True
        try:
            threading.Event().wait(0.0005)  # gives other threads the chance to come in
            return super().forward(*args)
        finally:
            self.inside = False


def test_several_threads_may_use_one_engine() -> None:
    made = replace(engine(False), target=_Guarded(VOCABULARY))
    todo = [requests(3, seed=seed, longest=10) for seed in range(4)]
    found: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        found[i] = ids(generate_requests(made, todo[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, part in enumerate(todo):
        assert found[i] == ids(generate_requests(engine(False), part))


def test_one_stream_in_two_threads_is_refused() -> None:
    """A stream is a generator: Python itself refuses a second thread while the first is in it."""
    inside, leave = threading.Event(), threading.Event()

    class Blocking(PathTarget):
        def forward(self, *args: Any) -> Any:
            inside.set()
            leave.wait(10)
            return super().forward(*args)

    stream: Iterator[StreamEvent] = stream_requests(replace(engine(False), target=Blocking(VOCABULARY)), requests(1))
    thread = threading.Thread(target=lambda: next(stream))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(ValueError, match="already executing"):
        next(stream)
    leave.set()
    thread.join()


# -- memory ------------------------------------------------------------------------------------


def test_eight_long_rows_hold_little_more_than_their_committed_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of 8 rows of 2,000 tokens: at most 2.2 times what is committed."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    settings = tiny.hf_model("llama").config.to_dict() | small
    settings |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096}
    long = Decoder(config_from_hf(settings)).eval().requires_grad_(False)
    made: list[KVCache] = []
    monkeypatch.setattr(long, "new_cache", lambda *a: made.append(Decoder.new_cache(long, *a)) or made[-1])
    prompts = torch.randint(0, tiny.VOCAB, (8, 1960), generator=torch.Generator().manual_seed(0)).tolist()
    outputs = generate_requests(
        Engine(long, PromptLookup(), None, ()), [Request(p, SamplingParams(max_new_tokens=40)) for p in prompts]
    )
    assert [len(o.token_ids) for o in outputs] == [40] * 8
    position = made[0].key_block[:, 0, :, 0].nbytes + made[0].value_block[:, 0, :, 0].nbytes
    held = made[0].key_block.nbytes + made[0].value_block.nbytes
    assert len(made) == 1 and held >= 8 * 2000 * position
    assert held <= 2.2 * 8 * 2000 * position
