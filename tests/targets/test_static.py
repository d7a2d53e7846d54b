"""Forwards of few shapes, as CUDA replays them: equal to plain decoding, at the same addresses, without waits."""

from __future__ import annotations

import copy
import gc
import operator
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import aquiline
from aquiline.cache import KVCache, commit
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.trees import DynamicTree
from aquiline.sampling import SamplingParams
from aquiline.targets import static
from aquiline.targets.decoder import Decoder
from aquiline.targets.static import StaticDecoder, StaticInput, static_forward
from aquiline.targets.target import Feature, Target, TargetInput, TargetOutput
from aquiline.tree import ancestors, depths
from tests import tiny
from tests.knowing_drafter import KnowingDrafter, known_from
from tests.pretend_device import Away, Counts, pretended_device, pretended_graphs

GREEDY = SamplingParams(max_new_tokens=24, logprobs=2)
SAMPLING = replace(GREEDY, temperature=0.8, top_p=0.9, seed=5)


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets short texts pass through several buckets."""
    monkeypatch.setattr(static, "LEAST_SPAN", 16)


@dataclass(eq=False)
class Direct:
    """Calls forwards as a graph would be replayed: notes where the inputs lie, and spoils the last outputs."""

    counts: Counts | None = None
    places: defaultdict[Any, list[Any]] = field(default_factory=lambda: defaultdict(list))
    out: TargetOutput | None = None

    def __call__(
        self, decoder: Decoder, inputs: StaticInput, cache: KVCache, span: int, features: tuple[Feature, ...]
    ) -> TargetOutput:
        causal = inputs.ancestors is None
        tensors = [inputs.tokens, inputs.positions, inputs.lengths, *inputs.rotary, cache.key_block, cache.value_block]
        tensors += [] if inputs.ancestors is None else [inputs.ancestors]
        self.places[(*inputs.tokens.shape, span, causal, features)].append([place(tensor) for tensor in tensors])
        if self.out is not None:
            self.out.logits.fill_(torch.nan)
            if self.out.features is not None:
                self.out.features.fill_(torch.nan)
        before = self.copies()
        self.out = static_forward(decoder, inputs, cache, span, features)
        assert self.copies() == before, "a graph cannot copy between the host and the device"
        return self.out

    def copies(self) -> int:
        return self.counts.to_host.total() + self.counts.to_device.total() if self.counts else 0


def place(tensor: Tensor) -> tuple[Any, ...]:
    inner = tensor.inner if isinstance(tensor, Away) else tensor
    return inner.data_ptr(), inner.shape, inner.stride()


def drafter_of(name: str, target: Target, texts: list[list[int]]) -> Drafter | None:
    if name == "plain":
        return None
    if name == "lookahead":
        return Lookahead(4, 3, 4)
    if name == "eagle3":
        return EagleDrafter(tiny.head("eagle3", dtype=torch.float32), target, DynamicTree(12, 3, 3))
    branches = 1 if name == "chain" else 3
    return KnowingDrafter(known_from(texts), tiny.VOCAB, depth=4, branches=branches, features=(2, "final"))


DRAFTS = ("plain", "chain", "tree", "lookahead", "eagle3")


def expected(family: str, rows: int, params: SamplingParams) -> tuple[list[list[int]], list[Any]]:
    """Prompts, and plain decoding's outputs on the CPU."""
    prompts = tiny.prompts(rows, seed=3, longest=9)
    return prompts, aquiline.load(tiny.decoder(family, torch.float32), None, packed=False).generate(prompts, params)


def assert_equal(outputs: list[Any], plain: list[Any], drafts: bool) -> None:
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    for output, other in zip(outputs, plain, strict=True):
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    if drafts:
        assert any(output.stats.accepted for output in outputs)
        assert any(output.stats.accepted < sum(output.stats.offered_at) for output in outputs)


@pytest.mark.oracle
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("family", "name"), [*(("llama", name) for name in DRAFTS), ("mistral", "plain"), ("mistral", "tree")]
)
def test_inputs_stay_where_they_are_and_outputs_equal_plain_decoding(family: str, name: str, rows: int) -> None:
    prompts, plain = expected(family, rows, GREEDY)
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts, plain, strict=True)]
    target = StaticDecoder(tiny.decoder(family, torch.float32))
    direct = target._forward = Direct()
    outputs = aquiline.load(target, drafter_of(name, target, texts)).generate(prompts, GREEDY)
    assert_equal(outputs, plain, drafts=name in ("chain", "tree"))
    assert len(direct.places) > 1 and max(map(len, direct.places.values())) > 2
    for bucket, places in direct.places.items():
        assert all(found == places[0] for found in places), bucket


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "rows", "device"),
    [
        ("plain", 1, "cpu"), ("chain", 3, "cpu"), ("tree", 3, "cpu"), ("lookahead", 1, "cpu"),
        ("tree", 1, "pretended"), ("eagle3", 3, "pretended"),
    ],
)  # fmt: skip
def test_replayed_graphs_equal_plain_decoding(
    name: str, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, plain = expected("llama", rows, SAMPLING)
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts, plain, strict=True)]
    with pretended_device() as counts, pretended_graphs(monkeypatch) as graphs:
        decoder = copy.deepcopy(tiny.decoder("llama", torch.float32)).to(device)
        target = StaticDecoder(decoder)
        target.graphs, target._forward = True, Direct(counts)
        calls = target._forward.places
        outputs = aquiline.load(target, drafter_of(name, target, texts)).generate(prompts, SAMPLING)
    assert_equal(outputs, plain, drafts=name in ("chain", "tree"))
    assert len(graphs) == len(calls) > 1
    assert all(len(places) == 3 for places in calls.values()), "two calls warm up, the third is captured"
    assert sum(output.stats.steps for output in outputs) > len(graphs)


def tree_inputs(cache: KVCache, row: int, width: int, chain: bool) -> TargetInput:
    """A chain or a binary tree of `width` tokens after the committed ones of a row."""
    parents = torch.tensor([[node - 1 if chain else (node - 1) // 2 for node in range(width)]]).clamp(min=-1)
    tokens, positions = torch.arange(width)[None] + 5, cache.lengths[row] + depths(parents)
    return TargetInput(tokens, positions, None if chain else ancestors(parents), cache, [row])


def filled(target: Target, rows: int, lengths: dict[int, int]) -> KVCache:
    """A cache whose rows hold so many tokens."""
    cache = target.new_cache(rows, 64)
    for row, length in lengths.items():
        ids = torch.arange(3 + row, 3 + row + length)[None]
        target.forward(TargetInput(ids, torch.arange(length)[None], None, cache, [row], (), torch.tensor([[0]])))
        commit(cache, torch.arange(length)[None], [row])
    return cache


def test_each_bucket_is_compiled_once_into_one_graph() -> None:
    decoder = copy.deepcopy(tiny.decoder("llama", torch.float32))
    decoder.layers = decoder.layers[:1]
    counter = CompileCounter()
    target = StaticDecoder(decoder, counter)  # which refuses graphs with a break
    cache, buckets = filled(target, 1, {0: 3}), set()
    for length in (3, 5, 20):
        cache.lengths[0] = length
        for width in (1, 2, 3, 4, 6):
            for chain in (True, False):
                inputs = tree_inputs(cache, 0, width, chain)
                torch.testing.assert_close(target.forward(inputs).logits, decoder.forward(inputs).logits)
                buckets.add(static.bucket_of(inputs))
    assert counter.frame_count == len(buckets) > 8


def test_compiled_forwards_write_into_each_layer_s_keys_themselves() -> None:
    """A write through a view of an input would make inductor copy the whole cache for each token."""
    decoder = copy.deepcopy(tiny.decoder("llama", torch.float32))
    decoder.layers = decoder.layers[:2]
    written: list[Tensor] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        given = [node for node in graph.graph.nodes if node.op == "placeholder"]
        changed = [
            node.args[0] for node in graph.graph.nodes if node.target in (operator.setitem, "copy_", "index_put_")
        ]
        written.extend(inputs[given.index(node)] for node in changed)
        return graph.forward

    target = StaticDecoder(decoder, backend)
    cache = filled(target, 1, {0: 3})
    target.forward(tree_inputs(cache, 0, 4, chain=False))
    layers = [*map(cache.keys, range(2)), *map(cache.values, range(2))]
    assert {tensor.data_ptr() for tensor in written} == {tensor.data_ptr() for tensor in layers}
    assert all(tensor.shape == layers[0].shape for tensor in written)


def test_rows_that_sit_out_keep_their_tokens_and_stay_finite() -> None:
    target = StaticDecoder(tiny.decoder("llama", torch.float16))
    cache = filled(target, 4, {1: 7, 2: 9})
    before = cache.key_block[:, 1, :, :7].clone()
    inputs = tree_inputs(cache, 2, 5, chain=False)
    found = target.forward(inputs).logits.clone()
    assert torch.equal(cache.key_block[:, 1, :, :7], before)
    assert cache.key_block.isfinite().all() and cache.value_block.isfinite().all()
    torch.testing.assert_close(found, target.decoder.forward(inputs).logits, rtol=0.02, atol=0.05)
    (capture,) = target._blocks[cache].captures.values()
    assert capture.inputs.ancestors is not None
    assert capture.inputs.ancestors[0].equal(torch.eye(8, dtype=torch.bool)), "padding sees itself"


def test_a_cache_that_moves_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_graphs(monkeypatch) as graphs:
        target = StaticDecoder(tiny.decoder("llama", torch.float32))
        target.graphs = True
        cache = filled(target, 1, {0: 9})
        for moves in (False, False, True):
            if moves:
                cache.reserve(cache.capacity + 1)
            inputs = tree_inputs(cache, 0, 4, chain=False)
            torch.testing.assert_close(target.forward(inputs).logits, target.decoder.forward(inputs).logits)
            assert len(graphs) == 1 + moves
        gc.collect()
        assert [graph() is not None for graph in graphs] == [False, True], "graphs outlive their cache's blocks"


@pytest.mark.oracle
def test_the_next_request_replays_the_graphs_of_the_last_and_another_size_frees_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, plain = expected("llama", 3, SAMPLING)
    captured = []
    with pretended_graphs(monkeypatch) as graphs:
        target = StaticDecoder(tiny.decoder("llama", torch.float32))
        target.graphs = True
        loaded = aquiline.load(target, None)
        for count in (1, 1, 3, 3, 1):
            outputs = loaded.generate(prompts[:count], SAMPLING)
            assert_equal(outputs, plain[:count], drafts=False)
            captured.append(len(graphs))
        alive = [graph() is not None for graph in graphs]
    assert target.graphs, "a pool is used after its last graph"
    assert captured[0] == captured[1] < captured[2] == captured[3] < captured[4]
    assert not any(alive[: captured[3]]) and all(alive[captured[3] :])


def test_a_cache_takes_over_clean_blocks_that_nobody_uses() -> None:
    target = StaticDecoder(tiny.decoder("llama", torch.float32))
    first = filled(target, 1, {0: 9})
    inputs = tree_inputs(first, 0, 4, chain=False)
    logits = target.forward(inputs).logits.clone()
    blocks = first.key_block
    assert target.new_cache(1, 64).key_block is not blocks, "in use"
    target = StaticDecoder(target.decoder)
    target.forward(inputs)
    blocks.fill_(torch.nan)
    del first, inputs
    second = filled(target, 1, {0: 9})
    assert second.key_block is blocks and blocks.isfinite().all()
    assert torch.equal(target.forward(tree_inputs(second, 0, 4, chain=False)).logits, logits)


def test_a_capture_that_fails_costs_the_graphs_and_not_the_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(device: torch.device) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "current_stream", refuses)
    decoder = tiny.decoder("llama")
    model = StaticDecoder(decoder)
    model.graphs = True
    outputs = [
        aquiline.load(target, draft=None, packed=False).generate([3, 5, 7], GREEDY) for target in (model, decoder)
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert not model.graphs and [record.message for record in caplog.records if "not permitted" in record.message]
