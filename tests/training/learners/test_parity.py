"""EAGLE heads are trained on what they draft: parity with the drafter, and the losses on features."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aquiline.checkpoints.open import read_head
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.eagle_network import Eagle3Network
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree, TreePolicy
from aquiline.targets.loading import load_target
from aquiline.training.features import compute_features
from aquiline.training.learners.eagle import EagleLearner, build_micro_batch
from aquiline.training.learners.learner import Example
from aquiline.training.loop import train
from tests import tiny
from tests.drafters.loop import extend, rows_of
from tests.training.tiny_training import tiny_settings, write_set, write_target

TREES: list[TreePolicy] = [Chain(4), StaticTree(), DynamicTree(num_nodes=14, depth=4, top_k=3)]


def trained_view(tokens: list[int], row: int, steps: int, *, pack: bool) -> list[Tensor]:
    """Log-probabilities that the unroll gives at `row` in each step, as in training."""
    target, head = tiny.decoder("llama"), tiny.head("eagle")
    ids = torch.tensor(tokens)
    final = compute_features(target, ids, ("final",))
    example = Example(ids, torch.ones(len(ids), dtype=torch.bool), final, final)
    other = Example(ids.flip(0)[:5], example.mask[:5], final[:5], final[:5])
    embedding = target.embed_tokens.weight
    micro = build_micro_batch([other, example], embedding, steps, pack=pack)
    learner = EagleLearner(head, target, target.lm_head.weight, embedding)
    with torch.no_grad():
        streams = learner.streams(micro)
        rows = [s[0, 4 + row] if pack else s[1, row] for s in streams]
        return [learner.logits(r).log_softmax(-1) for r in rows]


@pytest.mark.parametrize("policy", TREES, ids=["chain", "static", "dynamic"])
def test_every_path_of_a_tree_is_what_the_unroll_says(policy: TreePolicy) -> None:
    target, head = tiny.decoder("llama"), tiny.head("eagle")
    prefix = tiny.prompts(3, seed=2)[2] + [5, 60, 33, 7]
    size = len(prefix)
    final = compute_features(target, torch.tensor(prefix), ("final",))[None]
    drafter = EagleDrafter(head, target, policy)
    state = drafter.new_state(1, 64)
    first = 3  # in two pieces, as prefill and a step do
    extend(drafter, state, 0, prefix[: first + 1], final[:, :first])
    extend(drafter, state, 0, prefix, final[:, first : size - 1])
    tree = drafter.propose(rows_of(prefix), state)
    assert tree.log_probs is not None and int(tree.num_nodes[0]) > 4
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    for node in range(1, int(tree.num_nodes[0])):
        path: list[int] = []
        above = node
        while above > 0:
            path.insert(0, tokens[above])
            above = parents[above]
        said = trained_view(prefix + path, size - 2, len(path), pack=node % 2 == 0)
        joint = sum(float(logs[token]) for logs, token in zip(said, path, strict=True))
        assert joint == pytest.approx(float(tree.log_probs[0, node]), abs=1e-4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    write_target(folder / "target")
    write_set(folder / "set", conversations=6, length=14)
    return folder


def test_eagle3_with_one_layer_and_a_loss_on_features(base: Path) -> None:
    train(tiny_settings(base, "top", layers=(7,), feature_weight=1.0, total_positions=60))
    head = read_head(base / "top" / "head", load_target(base / "target", torch.float32).shape)
    assert head.config.features == (7,)
    first = json.loads((base / "top" / "metrics.jsonl").read_text().splitlines()[0])
    tokens = sum(0.8**i * loss for i, loss in enumerate(first["token_loss"]))
    assert first["loss"] > 1.05 * tokens


def test_the_feature_loss_of_eagle3_is_on_the_normed_stream() -> None:
    target, head = tiny.decoder("llama"), tiny.head("eagle3")
    ids = torch.tensor(tiny.prompts(3, seed=2)[2])
    both = compute_features(target, ids, (*head.config.features, "final"))
    example = Example(ids, torch.ones(len(ids), dtype=torch.bool), both[:, :-48], both[:, -48:])
    embedding = target.embed_tokens.weight
    micro = build_micro_batch([example], embedding, 2)
    rows = target.lm_head.weight[::2]
    scales = [0.5, 0.25]
    with torch.no_grad():
        plain, featured = (
            EagleLearner(head, target, rows, embedding, feature_weight=weight).loss(micro, scales)[0]
            for weight in (0.0, 2.0)
        )
        network = head.network
        assert isinstance(network, Eagle3Network)
        expected = 0.0
        for stream, at, wanted, scale in zip(
            EagleLearner(head, target, rows, embedding).streams(micro), micro.counted, micro.wanted, scales, strict=True
        ):
            difference = network.norm(stream[0, at]) - micro.final[wanted]
            small = difference.abs() < 1
            errors = torch.where(small, 0.5 * difference**2, difference.abs() - 0.5)
            expected += scale * float(errors.mean(-1).sum())
    assert float(featured - plain) == pytest.approx(2 * expected, rel=1e-9)
