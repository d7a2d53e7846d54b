"""The gate: a head that knows the new texts passes, one that learned noise does not."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Engine, Request
from aquiline.renew.gate import FEWEST, Gain, decide, judge
from aquiline.renew.settings import RenewSettings
from aquiline.sampling import SamplingParams
from aquiline.training.data.dataset import FORMAT, SplitWriter, TokenisedConversation
from tests import tiny
from tests.drafters.taught import Texts, eagle_head
from tests.tiny_tokenizers import every_byte
from tests.training.tiny_training import write_target

LENGTH = 9


def gain(value: float, low: float) -> Gain:
    return Gain(100.0, 100.0 * (1 + value), value, low, 2 * value - low, (0.5,), (0.6,), 30)


def held_out(folder: Path, texts: Texts) -> Path:
    """A training set that holds out all of its conversations."""
    folder.mkdir()
    counts = {}
    for split, kept in (("train", []), ("validation", list(texts))):
        with SplitWriter(folder / f"{split}.arrow") as writer:
            for prompt, answer in kept:
                tokens = np.array([*prompt, *answer], dtype=np.int32)
                writer.add(TokenisedConversation(tokens, np.arange(len(tokens)) >= len(prompt), "", "served"))
        counts[split] = dataclasses.asdict(writer.counts)
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "tokenizer_hash": "tiny", "counts": counts}))
    return folder


@pytest.fixture(scope="module")
def answers() -> Texts:
    engine = Engine(copy.deepcopy(tiny.decoder("llama", torch.float32)).double(), None, None, (), max_rows=16)
    requests = [Request(prompt, SamplingParams(max_new_tokens=LENGTH)) for prompt in tiny.prompts(4, seed=3)]
    texts = [(output.prompt_tokens, output.token_ids) for output in generate_requests(engine, requests)]
    return texts * 4  # a linear map of 48 numbers cannot know more of them


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, answers: Texts) -> Path:
    base = tmp_path_factory.mktemp("gate")
    every_byte().save_pretrained(write_target(base / "target"))
    old, new = (
        tiny.head("eagle3"),
        eagle_head("eagle3", copy.deepcopy(tiny.decoder("llama", torch.float32)).double(), answers[:4]),
    )
    for name, head in (("old", old), ("new", new)):
        write_head(base / name, head, torch.float32)
    held_out(base / "answers", answers)
    generator = np.random.default_rng(0)
    noise = [(prompt, generator.integers(0, tiny.VOCAB, LENGTH).tolist()) for prompt, _ in answers]
    held_out(base / "noise", noise)
    held_out(base / "few", answers[: FEWEST - 1])
    return base


def settings(folder: Path, data: Sequence[str]) -> RenewSettings:
    return RenewSettings(str(folder / "target"), "", tuple(str(folder / name) for name in data), 3, "float32")


def test_a_head_that_knows_the_new_texts_passes(folder: Path) -> None:
    verdict = judge(settings(folder, ["answers"]), folder / "old", folder / "new", folder / "answers")
    assert verdict.better and verdict.reason.startswith("better: +")
    assert verdict.served is not None and verdict.served.gain >= verdict.served.low > 0.1
    assert verdict.served.new_alphas[0] > 0.3 > verdict.served.old_alphas[0]
    assert verdict.served.new > verdict.served.old > 0


def test_a_poisoned_store_changes_no_head(folder: Path) -> None:
    verdict = judge(settings(folder, ["answers"]), folder / "old", folder / "new", folder / "noise")
    assert not verdict.better and "not clearly better" in verdict.reason


def test_a_loss_on_the_original_data_and_few_conversations_change_no_head(folder: Path) -> None:
    back = judge(settings(folder, ["answers"]), folder / "new", folder / "old", folder / "answers")
    assert not back.better and back.served is not None and back.served.high < 0
    few = judge(settings(folder, ["answers"]), folder / "old", folder / "new", folder / "few")
    assert not few.better and f"{FEWEST} are needed" in few.reason


def test_the_rule() -> None:
    assert decide(gain(0.05, 0.01), gain(0.0, -0.05)).better
    assert decide(gain(0.05, 0.01), None).better
    assert not decide(gain(0.05, -0.001), gain(0.05, 0.04)).better, "not clearly"
    assert not decide(gain(0.005, 0.004), gain(0.0, 0.0)).better, "not worth a swap"
    assert "worse elsewhere" in decide(gain(0.05, 0.01), gain(-0.02, -0.03)).reason
    assert not decide(None, None).better
