"""A tiny target folder and training sets of its own words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from aquiline.targets.target import TargetInput
from aquiline.training.data.dataset import FORMAT, SplitWriter, TokenisedConversation
from aquiline.training.settings import TrainSettings
from tests.tiny import VOCAB, decoder, hf_model


def write_target(folder: Path, sharpness: float = 1.0) -> Path:
    """The tiny Llama in float32, as a folder; logits times `sharpness`, same greedy text."""
    folder.mkdir(parents=True)
    model = hf_model("llama", torch.float32)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    tensors = {name: t.clone().contiguous() for name, t in model.state_dict().items()}
    tensors["lm_head.weight"] *= sharpness
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def greedy_conversation(prompt: list[int], length: int) -> TokenisedConversation:
    """A prompt and the target's greedy answer, computed without any cache."""
    target = decoder("llama", torch.float32)
    tokens = list(prompt)
    for _ in range(length):
        cache = target.new_cache(1, len(tokens))
        out = target.forward(
            TargetInput(torch.tensor([tokens]), torch.arange(len(tokens))[None], None, cache, [0], (), None)
        )
        tokens.append(int(out.logits[0, -1].argmax()))
    mask = np.arange(len(tokens)) >= len(prompt)
    return TokenisedConversation(np.array(tokens, dtype=np.int32), mask, str(prompt), "tiny:0")


def write_set(folder: Path, conversations: int, length: int, seed: int = 0) -> Path:
    """A training set of greedy answers; its validation split is two of the same kind."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    counts = {}
    for split, number in (("train", conversations), ("validation", 2)):
        with SplitWriter(folder / f"{split}.arrow") as writer:
            for _ in range(number):
                prompt = generator.integers(0, VOCAB, int(generator.integers(3, 8))).tolist()
                writer.add(greedy_conversation(prompt, length + int(generator.integers(0, 5))))
        counts[split] = dataclasses.asdict(writer.counts)
    manifest = {"format": FORMAT, "tokenizer_hash": "tiny", "counts": counts, "seed": seed}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


SIZES: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 3},
    "eagle": {"ttt_steps": 3, "feature_weight": 0.5},
    "medusa": {"num_heads": 3, "regress_positions": 60},
    "hydra": {"num_heads": 3, "regress_positions": 60},
    "small-model": {"num_layers": 4},
}
"""Settings that only some kinds have."""


def tiny_settings(base: Path, output: str, kind: str = "eagle3", **changes: Any) -> TrainSettings:
    """A run of 8 steps on `base` / "target" and `base` / "set"."""
    settings: dict[str, Any] = SIZES[kind] | {
        "kind": kind,
        "target": str(base / "target"),
        "data": (str(base / "set"),),
        "output": str(base / output),
        "draft_vocab_size": 60,
        "max_length": 64,
        "batch_positions": 60,
        "micro_positions": 40,
        "total_positions": 480,
        "warmup_positions": 60,
        "lr": 3e-3,
        "log_steps": 1,
        "workers": 1,
        "dtype": "float32",
    }
    return TrainSettings(**(settings | changes))


def weights(output: Path) -> dict[str, Tensor]:
    """The network in the checkpoint of a run."""
    state = torch.load(output / "checkpoint.pt", weights_only=True)["network"]
    assert isinstance(state, dict)
    return state


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
