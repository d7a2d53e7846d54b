"""Heads for targets that only transformers computes: the same training, on what the target says of itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import aquiline
from aquiline.checkpoints.open import read_head
from aquiline.drafters.eagle import EagleDrafter
from aquiline.targets.hf import HFTarget
from aquiline.training.data.dataset import FORMAT, SplitWriter, TokenisedConversation
from aquiline.training.features import compute_features
from aquiline.training.learners.target_parts import draft_layer, embedding_table, read_out_rows
from aquiline.training.loop import train
from aquiline.training.settings import TrainSettings
from tests.targets import hf_models


@pytest.mark.parametrize("family", ["gemma3", "cohere", "granite", "mixtral", "gpt2"])
def test_the_parts_are_the_targets(family: str) -> None:
    """Scaled embeddings and logits come out whatever the model does around its matrices."""
    model = hf_models.build(family)
    target = HFTarget(model)
    ids = torch.tensor([[3, 90, 41, 17]])
    out = model(input_ids=ids, output_hidden_states=True)
    embedded = embedding_table(target)[ids[0]]
    torch.testing.assert_close(embedded, model.get_input_embeddings()(ids)[0])
    if family == "gemma3":
        torch.testing.assert_close(embedded, out.hidden_states[0][0])
        ratio = embedded / model.model.embed_tokens.weight[ids[0]]
        torch.testing.assert_close(ratio, torch.full_like(ratio, 48**0.5))
    final = compute_features(target, ids[0], ("final",))
    wanted = torch.tensor([96, 0, 13])
    torch.testing.assert_close(final @ read_out_rows(target, None).t(), out.logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        final @ read_out_rows(target, wanted).t(), out.logits[0][:, wanted], atol=1e-4, rtol=1e-4
    )
    layer = draft_layer(target)
    assert (layer.hidden_size, layer.num_heads, layer.rope.dim) == (48, 4, layer.head_dim)


def test_a_soft_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="not a linear function of its last feature"):
        read_out_rows(HFTarget(hf_models.build("gemma2")), None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Gemma 3 as a folder, and a training set of its own greedy words."""
    folder = tmp_path_factory.mktemp("gemma")
    model = hf_models.build("gemma3")
    model.save_pretrained(folder / "target")
    loaded = aquiline.load(model, None)
    counts = {}
    (folder / "set").mkdir()
    generator = np.random.default_rng(0)
    for split, number in (("train", 8), ("validation", 2)):
        with SplitWriter(folder / "set" / f"{split}.arrow") as writer:
            for _ in range(number):
                prompt = generator.integers(0, hf_models.VOCAB, 5).tolist()
                tokens = [*prompt, *loaded.generate(prompt, max_new_tokens=30).token_ids]
                mask = np.arange(len(tokens)) >= len(prompt)
                writer.add(TokenisedConversation(np.array(tokens, dtype=np.int32), mask, str(prompt), "tiny:0"))
        counts[split] = dataclasses.asdict(writer.counts)
    manifest = {"format": FORMAT, "tokenizer_hash": "tiny", "counts": counts, "seed": 0}
    (folder / "set" / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_head_of_gemma_learns_and_drafts(base: Path, kind: str) -> None:
    """It overfits its eight texts, and its drafts are accepted on them, with plain decoding's words."""
    settings = TrainSettings(
        target=str(base / "target"),
        data=(str(base / "set"),),
        output=str(base / kind),
        kind=kind,
        draft_vocab_size=60 if kind == "eagle3" else 97,
        feature_weight=0.0 if kind == "eagle3" else 0.2,
        ttt_steps=2,
        max_length=64,
        batch_positions=280,
        micro_positions=280,
        total_positions=280 * (48 if kind == "eagle3" else 16),
        warmup_positions=280,
        lr=3e-3,
        workers=1,
        dtype="float32",
    )
    report = train(settings)
    assert report.stopped == "finished"
    losses = [json.loads(line) for line in (base / kind / "metrics.jsonl").read_text().splitlines()]
    accuracy = [record["accuracy"][0] for record in losses if "loss" in record]
    assert accuracy[-1] > 0.6 > accuracy[0]

    model = hf_models.build("gemma3")
    target = HFTarget(model)
    head = read_head(base / kind / "head", target.shape, torch.float32)
    assert isinstance(head.network, nn.Module)
    loaded = aquiline.load(model, EagleDrafter(head, target, aquiline.Chain(3)), adaptive=False)
    prompts = [np.random.default_rng(0).integers(0, hf_models.VOCAB, 5).tolist(), [1, 2, 3]]
    outputs = loaded.generate(prompts, max_new_tokens=30)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in loaded.plain().generate(prompts, max_new_tokens=30)]
    assert outputs[0].stats.mean_accept_length > 1.3
