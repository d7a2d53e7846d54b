"""The adapter for transformers models: equal to transformers in every way that decoding can tell."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from aquiline import tree as trees
from aquiline.cache import commit
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.trees import DynamicTree
from aquiline.targets.hf import HFTarget
from aquiline.targets.target import TargetInput
from aquiline.tree import DraftTree
from tests import tiny
from tests.drafters.loop import run
from tests.targets import hf_models

VOCAB = hf_models.VOCAB
PARENTS = [-1, 0, 0, 1, 1, 2, 4, 6, 6]
LEAVES = (3, 5, 7, 8)
LENGTHS = (5, 11, 17)


@pytest.fixture(scope="module", params=hf_models.FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    """One model of each family, built once."""
    return hf_models.build(request.param)


@pytest.fixture(scope="module")
def target(model: Any) -> HFTarget:
    """The adapter around it."""
    return HFTarget(model)


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 5e-5 * expected.abs().max())


def feed(target: HFTarget, cache: Any, row: int, tokens: Tensor, chunk: int) -> None:
    """Prefills one row in chunks, without logits."""
    nothing = torch.empty(1, 0, dtype=torch.int64)
    for start in range(0, len(tokens), chunk):
        piece = tokens[None, start : start + chunk]
        positions = torch.arange(start, start + piece.shape[1])[None]
        out = target.forward(TargetInput(piece, positions, None, cache, [row], logits_at=nothing))
        assert out.logits.shape == (1, 0, VOCAB) and out.logits.dtype == torch.float32
        commit(cache, torch.arange(piece.shape[1])[None], [row])


@torch.no_grad()
def plain(model: Any, tokens: Tensor) -> Any:
    return model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)


def path_to(leaf: int) -> list[int]:
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = PARENTS[leaf]
    return path[::-1]


@pytest.mark.oracle
def test_plain_greedy_equals_generate(model: Any, target: HFTarget) -> None:
    prompt = list(range(5, 15))
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0, len(prompt) :]
    found, _ = run(target, None, [prompt], [30])
    assert found[0] == ids.tolist()
    assert len(set(found[0])) >= 5, "the text is too dull to tell anything"


@pytest.mark.oracle
def test_ragged_trees_and_commits_equal_plain_forwards(model: Any, target: HFTarget) -> None:
    """Three rows of different lengths (beyond the window), in scattered slots, as one forward."""
    texts = [random_tokens(length, seed=length) for length in LENGTHS]
    rows, cache = [3, 0, 2], target.new_cache(4, 8)
    for row, text in zip(rows, texts, strict=True):
        feed(target, cache, row, text, chunk=7)
    parents = torch.tensor(PARENTS).expand(3, -1)
    tokens = random_tokens(3, len(PARENTS), seed=9)
    positions = torch.tensor(LENGTHS)[:, None] + trees.depths(parents)
    features = (3, "final", 0)
    for _ in range(2):  # Repeating a forward changes nothing.
        out = target.forward(TargetInput(tokens, positions, trees.ancestors(parents), cache, rows, features))
    assert out.features is not None and out.logits.dtype == torch.float32
    for i, text in enumerate(texts):
        for path in map(path_to, LEAVES):
            expected = plain(model, torch.cat((text, tokens[i, path])))
            assert close(out.logits[i, path], expected.logits[0, len(text) :])
            for part, k in zip(out.features[i, path].chunk(3, dim=-1), (3, -1, 0), strict=True):
                assert close(part, expected.hidden_states[k][0, len(text) :])
    accepted = [path_to(8), path_to(5), path_to(0)]
    width = max(map(len, accepted))
    commit(cache, torch.tensor([path + [-1] * (width - len(path)) for path in accepted]), rows)
    following = random_tokens(3, 3, seed=11)
    last = torch.full((3, 1), 2)
    positions = cache.lengths[rows][:, None] + torch.arange(3)
    after = target.forward(TargetInput(following, positions, None, cache, rows, logits_at=last))
    for i, text in enumerate(texts):
        expected = plain(model, torch.cat((text, tokens[i, accepted[i]], following[i])))
        assert close(after.logits[i, 0], expected.logits[0, -1])


class Knowing:
    """Drafts the true continuation with a mistake now and then, among decoys."""

    needs = Needs(features=(2, "final"))

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts

    def new_state(self, slots: int, capacity: int) -> None:
        return None

    def extend(self, committed: Committed, state: Any) -> None:
        assert committed.features is not None and committed.features.shape[:2] == (
            len(committed.counts),
            max(committed.counts),
        )

    def copy(self, source: int, slot: int, length: int, state: Any) -> None:
        return None

    def reset(self, slot: int, length: int, state: Any) -> None:
        return None

    def propose(self, rows: Rows, state: Any) -> DraftTree:
        """Root, then three levels of a decoy (first, so that the path is no prefix) and a guess."""
        tokens = torch.tensor(rows.roots)[:, None].repeat(1, 7)
        for i, (slot, text) in enumerate(zip(rows.slots, rows.texts, strict=True)):
            for level in range(3):
                at = len(text) + level
                truth = self.texts[slot][at] if at < len(self.texts[slot]) else 0
                guess = (truth + 1) % VOCAB if at % 5 == 0 else truth
                tokens[i, 1 + 2 * level], tokens[i, 2 + 2 * level] = (guess + 7) % VOCAB, guess
        parents = torch.tensor([-1, 0, 0, 2, 2, 4, 4]).expand(len(tokens), -1)
        return DraftTree(tokens, parents, torch.full((len(tokens),), 7))


@pytest.mark.oracle
def test_greedy_speculation_equals_plain(model: Any, target: HFTarget) -> None:
    prompts = [[7, 3, 9], list(range(4, 16)), list(range(30, 50))]
    budgets = [20, 26, 15]
    expected, _ = run(target, None, prompts, budgets)
    drafter = Knowing([prompt + text for prompt, text in zip(prompts, expected, strict=True)])
    found, stats = run(target, drafter, prompts, budgets)
    assert found == expected
    assert 0 < stats.accepted < sum(stats.offered_at)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gemma2", "phi3"])
def test_an_eagle_head_on_the_adapter_equals_plain(family: str) -> None:
    target = HFTarget(hf_models.build(family, torch.float64))
    head = tiny.head("eagle3")
    drafter = EagleDrafter(head, target, DynamicTree(depth=3, top_k=4, num_nodes=10))
    prompts = [[7, 3, 9], list(range(4, 16)), list(range(30, 50))]
    expected, _ = run(target, None, prompts, [24, 30, 18])
    found, stats = run(target, drafter, prompts, [24, 30, 18])
    assert found == expected and stats.steps > 0


def test_the_model_is_not_modified(model: Any) -> None:
    def state() -> tuple[Any, ...]:
        modules = [(sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in fresh.modules()]
        return modules, fresh.config.to_dict(), {k: v.clone() for k, v in fresh.state_dict().items()}

    fresh = copy.deepcopy(model)
    modules, config, tensors = state()
    run(HFTarget(fresh), None, [[1, 2, 3]], [4])
    after = state()
    assert (modules, config) == after[:2]
    assert all(torch.equal(tensor, after[2][name]) for name, tensor in tensors.items())


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gemma3", "mixtral", "qwen3-moe"])
def test_both_backends_compute_trees(family: str) -> None:
    """The eager path takes a float mask only, SDPA either."""
    eager, sdpa = (HFTarget(hf_models.build(family, attn_implementation=kind)) for kind in ("eager", "sdpa"))
    assert eager.model.config._attn_implementation == "eager"
    texts = [run(t, None, [list(range(5, 17))], [20])[0] for t in (eager, sdpa)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_project_is_the_models_head(family: str) -> None:
    """Scale and soft-cap included, and they matter for these models."""
    model = hf_models.build(family)
    target = HFTarget(model)
    out = plain(model, random_tokens(6))
    found = target.project(out.hidden_states[-1])
    assert torch.equal(found, out.logits)
    assert not close(model.get_output_embeddings()(out.hidden_states[-1]), out.logits)


def test_half_precision() -> None:
    """bfloat16 passes the probe and returns float32 logits."""
    target = HFTarget(hf_models.build("gemma3", torch.bfloat16))
    cache = target.new_cache(1, 8)
    out = target.forward(TargetInput(random_tokens(1, 4), torch.arange(4)[None], None, cache, [0], ("final", 2)))
    assert target.dtype == torch.bfloat16 and cache.key_block.dtype == torch.bfloat16
    assert out.logits.dtype == torch.float32 and out.features is not None
    assert out.features.dtype == torch.bfloat16 and out.features.shape == (1, 4, 96)


def test_layers_of_different_width() -> None:
    """Gemma 4 has wider keys in its global layers, and its last layers reuse earlier keys."""
    model = hf_models.build("gemma4")
    cache = HFTarget(model).new_cache(2, 8)
    assert cache.key_block.shape[0] == model.config.num_hidden_layers - model.config.num_kv_shared_layers
    widths = {layer.self_attn.head_dim for layer in model.model.layers}
    assert len(widths) == 2 and cache.key_block.shape[-1] == max(widths)


def test_frequencies_that_change_with_the_length_limit_the_context() -> None:
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    model = hf_models.build("phi3", rope_parameters=scaling, original_max_position_embeddings=32)
    target = HFTarget(model)
    assert target.shape.max_positions == 32
    cache = target.new_cache(1, 8)
    tokens = random_tokens(1, 32)
    expected = plain(model, tokens[0]).logits
    positions = torch.arange(32)[None]
    positions[:, -1] = 40  # A node beyond the context must not change what the others see.
    assert close(target.forward(TargetInput(tokens, positions, None, cache, [0])).logits[:, :-1], expected[:, :-1])
