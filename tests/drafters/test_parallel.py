"""Medusa and Hydra: equal to plain decoding; trees of candidates; files; typical acceptance."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from aquiline.checkpoints.open import open_head
from aquiline.checkpoints.parallel import build_parallel_network, heads_from_stored, write_parallel_heads
from aquiline.drafters.drafter import Committed
from aquiline.drafters.parallel import ParallelDrafter, ParallelHeads, lm_head_rows, sparse_tree
from aquiline.drafters.parallel_network import ParallelConfig
from aquiline.drafters.trees import Chain, StaticTree
from aquiline.sampling import LossyRule, SamplingParams
from tests import tiny
from tests.drafters.loop import Validating, assert_equal_to_plain, rows_of, run
from tests.drafters.overfit import heads, texts

KINDS = ("medusa", "hydra")
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)))


@pytest.fixture(scope="module")
def target():
    return tiny.decoder("llama")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.2, repetition_penalty=1.05)], ids=["greedy", "sampling"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [TREE, Chain(3), None], ids=["static", "chain", "default"])
def test_equals_plain(target, kind, rows, params, policy):
    drafter = Validating(ParallelDrafter(heads(kind), target, policy))
    prompts = [prompt for prompt, _ in texts()][:rows]
    # The heads know the first 36 tokens by heart, and nothing of the rest.
    assert_equal_to_plain(target, drafter, prompts, params, budget=50)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [False, True], ids=["the target's LM head", "an LM head of their own"])
def test_a_reduced_vocabulary_equals_plain(target, kind, own):
    made = heads(kind, own_lm_head=own, drafted=70)
    drafter = Validating(ParallelDrafter(made, target, TREE))
    stats = assert_equal_to_plain(target, drafter, [prompt for prompt, _ in texts()], SamplingParams(), budget=50)
    assert stats.mean_accept_length > 1.1


def test_rows_of_the_lm_head_are_found_where_it_is_linear(target):
    ids = torch.tensor([3, 50, 96])
    torch.testing.assert_close(lm_head_rows(target, ids).double(), target.lm_head.weight[ids], rtol=1e-6, atol=1e-6)

    class Capped:
        shape, dtype, device = target.shape, target.dtype, target.device

        def project(self, hidden):
            return 5 * torch.tanh(target.project(hidden) / 5)

    assert lm_head_rows(Capped(), ids) is None


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_know_the_text_are_accepted_to_their_depth(target, kind):
    """Overfit heads: almost every chain of 3 on their own text is right, so τ nears 4."""
    prompts = [prompt for prompt, _ in texts()]
    _, stats = run(target, ParallelDrafter(heads(kind), target, Chain(3)), prompts, [34] * 3)
    assert stats.mean_accept_length > 2.5


def random_heads(kind, **changes):
    sizes = {"hidden_size": 48, "vocab_size": 97, "draft_vocab_size": 97}
    config = ParallelConfig(kind, **({"num_heads": 3, "num_blocks": 2, "own_lm_head": True} | sizes | changes))
    torch.manual_seed(0)
    network = build_parallel_network(config).double().requires_grad_(False)
    for parameter in network.parameters():
        parameter.normal_(std=0.3)
    return ParallelHeads(network)


def test_a_medusa_tree_is_the_product_of_the_heads_candidates(target):
    made = random_heads("medusa")
    drafter = ParallelDrafter(made, target, TREE)
    state = drafter.new_state(2, 8)
    features = torch.randn(1, 3, 48, dtype=torch.float64)
    drafter.extend(Committed(rows_of([1, 2, 7], slots=[1]), features, [2]), state)
    assert torch.equal(state.feature[1], features[0, 1])
    tree = drafter.propose(rows_of([7], slots=[1]), state)
    best = [
        made.logits(made.network.stream(head, state.feature[1]), target).log_softmax(-1).sort(descending=True)
        for head in range(3)
    ]
    for node, path in enumerate(TREE.paths, 1):
        assert int(tree.tokens[0, node]) == int(best[len(path) - 1].indices[path[-1]])
        expected = sum(float(best[depth].values[rank]) for depth, rank in enumerate(path))
        assert float(tree.log_probs[0, node]) == pytest.approx(expected, abs=1e-5)
    assert drafter.propose(rows_of([7], slots=[1], max_depth=1), state).size == 4
    assert drafter.propose(rows_of([7], slots=[1], max_depth=0), state).size == 1


def test_a_hydra_node_reads_the_tokens_on_its_path(target):
    made = random_heads("hydra")
    drafter = ParallelDrafter(made, target, TREE)
    state = drafter.new_state(1, 8)
    state.feature[0] = torch.randn(48, dtype=torch.float64)
    tree = drafter.propose(rows_of([7]), state)
    node = {path: i for i, path in enumerate(TREE.paths, 1)}
    for path in ((1, 0), (0, 1, 0)):
        tokens = [7, *(int(tree.tokens[0, node[path[:d]]]) for d in range(1, len(path)))]
        stream = made.network.stream(len(path) - 1, state.feature[0], target.embed(torch.tensor(tokens)))
        expected = made.logits(stream, target).argsort(descending=True)[path[-1]]
        assert int(tree.tokens[0, node[path]]) == int(expected)


def test_the_sparse_tree_takes_the_likeliest_products():
    tree = sparse_tree([[0.6, 0.3], [0.5, 0.1], [0.4]], 6)
    # 0.6, 0.3, 0.6·0.5 = 0.3, 0.3·0.5 = 0.15, 0.6·0.5·0.4 = 0.12; 0.6·0.1 and less stay out
    assert set(tree.paths) == {(0,), (1,), (0, 0), (1, 0), (0, 0, 0)}
    assert len(sparse_tree([[0.6, 0.3]], 60).paths) == 2
    with pytest.raises(ValueError, match="num_nodes is 1"):
        sparse_tree([[0.6]], 1)


def test_measured_accuracies_make_the_default_tree(target):
    made = random_heads("medusa", accuracies=((0.9, 0.0), (0.9, 0.0), (0.9, 0.0)))
    assert ParallelDrafter(made, target).policy.paths[:2] == ((0,), (1,))
    assert (0, 0, 0) in ParallelDrafter(made, target).policy.paths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [False, True])
def test_files_round_trip(tmp_path, target, kind, own):
    made = random_heads(kind, own_lm_head=own, draft_vocab_size=50, accuracies=((0.5, 0.1), (0.25,), (0.0,)))
    made = replace(made, draft_to_target=torch.arange(40, 90), target_fingerprint="abc")
    write_parallel_heads(tmp_path / "head", made, torch.float64)
    back = heads_from_stored(open_head(tmp_path / "head", target.shape).contents, torch.float64)
    assert back.config == made.config
    assert back.target_fingerprint == "abc"
    assert torch.equal(back.draft_to_target, made.draft_to_target)
    for name, tensor in made.network.state_dict().items():
        assert torch.equal(back.network.state_dict()[name], tensor)


def break_config(folder, **changes):
    path = folder / "config.json"
    config = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "aquiline-final-heads-9"}, "aquiline-final-heads-9.*expected 'aquiline-final-heads-1'"),
        ({"hidden_size": 64}, "hidden_size 64 .*this target has 48"),
        ({"num_heads": None}, "lacks num_heads"),
        ({"num_heads": 4}, r"heads\.3.* are missing"),
        ({"num_blocks": 1}, r"heads\.0\.blocks\.1.* are unexpected"),
        ({"kind": "other"}, "allowed: medusa, hydra"),
        ({"draft_vocab_size": 98}, "exceeds vocab_size 97"),
        ({"draft_vocab_size": 90}, "neither d2t nor t2d"),
    ],
)
def test_refuses_files_that_are_no_heads_for_this_target(tmp_path, target, changes, message):
    write_parallel_heads(tmp_path, random_heads("medusa"))
    break_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        open_head(tmp_path, target.shape)


def test_rejects_heads_that_do_not_fit(target):
    made = random_heads("medusa")
    with pytest.raises(ValueError, match="4 deep; allowed: depth ≤ 3"):
        ParallelDrafter(made, target, Chain(4))
    with pytest.raises(ValueError, match=r"min_prob is 0\.\d+; allowed: 0"):
        ParallelDrafter(made, target, Chain(3, 0.1))
    with pytest.raises(ValueError, match="hidden_size 32"):
        ParallelDrafter(random_heads("medusa", hidden_size=32), target)


def test_typical_acceptance_is_lossy_and_a_threshold_of_one_is_exact(target):
    """Typical acceptance takes likely drafts that were not drawn; at threshold 1 nothing changes."""
    params = SamplingParams(temperature=0.8)
    drafter = ParallelDrafter(heads("medusa"), target, TREE)
    prompts = [prompt for prompt, _ in texts()]
    budgets = [35, 30, 33]
    plain, _ = run(target, None, prompts, budgets, params)
    exact, stats = run(target, drafter, prompts, budgets, params, lossy=LossyRule("threshold"))
    assert exact == plain
    assert not stats.lossy
    loose, lossy = run(target, drafter, prompts, budgets, params, lossy=LossyRule("typical"))
    assert lossy.lossy
    assert loose != plain
    assert lossy.mean_accept_length > stats.mean_accept_length
    with pytest.raises(ValueError, match="temperature is 0"):
        run(target, drafter, prompts, budgets, SamplingParams(), lossy=LossyRule("typical"))
