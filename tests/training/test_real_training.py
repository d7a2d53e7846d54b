"""Two minutes of real training: the target's own words in, a head that drafts them out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import aquiline
from aquiline.checkpoints.open import read_head
from aquiline.engine.request import GenerationOutput
from aquiline.targets.loading import load_target
from aquiline.training.data.dataset import FORMAT, SplitWriter, TokenisedConversation, open_training_set
from aquiline.training.learners.eagle import learn_head
from aquiline.training.learners.eagle_start import new_head
from aquiline.training.loop import train
from aquiline.training.settings import TrainSettings
from aquiline.training.validation import measure_acceptance
from tests.prompts import PROMPTS

pytestmark = pytest.mark.real

HELD_OUT = 6


@pytest.fixture(autouse=True)
def both_cores() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def write_own_words(folder: Path, outputs: list[GenerationOutput]) -> None:
    """A training set of the target's answers; the last of them are the validation split."""
    folder.mkdir()
    counts = {}
    for split, part in (("train", outputs[:-HELD_OUT]), ("validation", outputs[-HELD_OUT:])):
        with SplitWriter(folder / f"{split}.arrow") as writer:
            for i, output in enumerate(part):
                tokens = np.array([*output.prompt_tokens, *output.token_ids], dtype=np.int32)
                mask = np.arange(len(tokens)) >= len(output.prompt_tokens)
                writer.add(TokenisedConversation(tokens, mask, f"{split} {i}", "own words"))
        counts[split] = dataclasses.asdict(writer.counts)
    manifest = {"format": FORMAT, "tokenizer_hash": "own words", "counts": counts, "seed": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def first_acceptance(settings: TrainSettings, head: Path | None) -> float:
    """0-α on the held-out answers, of a trained head or of one that was never trained."""
    target = load_target(settings.target, getattr(torch, str(settings.dtype)))
    sets = [open_training_set(path) for path in settings.data]
    drafts = new_head(settings, target, sets) if head is None else read_head(head, target.shape)
    held_out = open_training_set(settings.data[0], split="validation")
    conversations = [
        (torch.from_numpy(row.input_ids.copy()).long(), torch.from_numpy(row.loss_mask.copy())) for row in held_out
    ]
    return measure_acceptance(learn_head(target, drafts), conversations).alphas[0]


@pytest.mark.timeout(900)
def test_a_short_training_beats_none_on_held_out_answers(smollm2_folder: Path, tmp_path: Path) -> None:
    loaded = aquiline.load(smollm2_folder)
    outputs = loaded.plain().generate(PROMPTS, max_new_tokens=160)
    write_own_words(tmp_path / "set", outputs)
    settings = TrainSettings(
        target=str(smollm2_folder),
        data=(str(tmp_path / "set"),),
        output=str(tmp_path / "run"),
        features=str(tmp_path / "features"),
        draft_vocab_size=4096,
        ttt_steps=1,
        batch_positions=1024,
        total_positions=40_000,
        warmup_positions=4_000,
        decay_share=0.8,
        validate_positions=10**9,
    )
    report = train(settings)
    assert report.stopped == "finished"
    untrained, trained = first_acceptance(settings, None), first_acceptance(settings, tmp_path / "run" / "head")
    assert trained >= untrained + 0.15, (untrained, trained)
