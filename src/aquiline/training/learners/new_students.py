"""Where Medusa and Hydra heads and small models begin, and how they are written."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.checkpoints.parallel import build_parallel_network, write_parallel_heads
from aquiline.drafters.parallel import ParallelHeads
from aquiline.drafters.parallel_network import ParallelConfig
from aquiline.targets.decoder import Decoder, DecoderConfig, config_from_hf
from aquiline.training.learners.students import HeadsStudent, SmallModelStudent, SmallNetwork, Student
from aquiline.training.settings import TrainSettings

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def new_student(settings: TrainSettings, target: Decoder, target_head: Tensor) -> Student:
    """Makes an untrained student.

    Heads begin by passing on the feature (`aquiline.training.learners.regression` gives them a better
    start); a small model begins as copies of the target's first and last layers.

    Args:
        settings: kind and sizes.
        target: the target.
        target_head: (Vd, H) rows of its LM head, all or those of the draft vocabulary.

    Raises:
        ValueError: for a small model of a target with a sliding window below the longest text.
    """
    torch.manual_seed(settings.seed)
    if settings.kind == "small-model":
        config = small_config(target.config, settings.num_layers)
        if any(window is not None and window < settings.max_length for window in config.windows):
            raise ValueError(
                f"max_length {settings.max_length} exceeds this target's sliding window; lower it to "
                f"{min(w for w in config.windows if w is not None)} to distil a small model"
            )
        network = SmallNetwork(config)
        for mine, source in enumerate(copied_layers(target.config.num_layers, settings.num_layers)):
            network.layers[mine].load_state_dict(target.layers[source].state_dict())
        network.norm.load_state_dict(target.norm.state_dict())
        return SmallModelStudent(network.float().train(), target, target_head)
    heads = ParallelConfig(
        kind=settings.kind,
        num_heads=settings.num_heads,
        hidden_size=target.shape.hidden_size,
        vocab_size=target.shape.vocab_size,
        draft_vocab_size=len(target_head),
        num_blocks=settings.num_blocks,
        own_lm_head=settings.own_lm_head,
        rms_norm_eps=target.config.layer.rms_norm_eps,
    )
    final = build_parallel_network(heads)
    if heads.own_lm_head:
        with torch.no_grad():
            final.lm_head.weight.copy_(target_head)
    return HeadsStudent(final.float().train(), target, target_head)


def copied_layers(total: int, wanted: int) -> list[int]:
    """Which of the target's layers a small model begins with: the first ones and the last ones.

    Raises:
        ValueError: for more layers than the target has.
    """
    if wanted > total:
        raise ValueError(f"num_layers is {wanted}, the target has {total}; choose fewer")
    first = (wanted + 1) // 2
    return [*range(first), *range(total - (wanted - first), total)]


def small_config(config: DecoderConfig, layers: int) -> DecoderConfig:
    """The target's configuration with few layers."""
    kept = copied_layers(config.num_layers, layers)
    return replace(
        config,
        num_layers=layers,
        windows=tuple(config.windows[i] for i in kept),
        rotary=tuple(config.rotary[i] for i in kept),
    )


def save_student(
    folder: Path,
    student: Student,
    settings: TrainSettings,
    target: Decoder,
    vocabulary: Tensor | None,
    fingerprint: str,
    accuracies: Sequence[Sequence[float]],
) -> None:
    """Writes what was learned: heads as `aquiline.checkpoints.parallel`, a small model as a model folder.

    Args:
        folder: made if it does not exist.
        student: with the master weights.
        settings: of the run.
        target: the target.
        vocabulary: (Vd,) int64 target ids of the draft ids, or None.
        fingerprint: of the target.
        accuracies: per head and rank, as measured; empty where it was not.
    """
    if isinstance(student, HeadsStudent):
        heads = ParallelHeads(student.network, vocabulary, fingerprint)
        measured = tuple(tuple(round(value, 4) for value in row) for row in accuracies)
        student.network.config = replace(student.network.config, accuracies=measured)
        write_parallel_heads(folder, heads)
        return
    assert isinstance(student, SmallModelStudent)
    _write_small_model(folder, student.network, Path(settings.target), target, fingerprint)


def _write_small_model(folder: Path, network: SmallNetwork, source: Path, target: Decoder, fingerprint: str) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": t for name, t in network.state_dict().items()}
    tensors["model.embed_tokens.weight"] = target.embed_tokens.weight
    if not target.config.tied:
        tensors["lm_head.weight"] = target.lm_head.weight
    tensors = {name: t.detach().to(torch.bfloat16).contiguous() for name, t in tensors.items()}
    config = small_model_json(json.loads((source / "config.json").read_text(encoding="utf-8")), network.config)
    config["aquiline_target_fingerprint"] = fingerprint
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        save_file(tensors, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        (Path(scratch) / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copy(source / name, Path(scratch) / name)
        for path in Path(scratch).iterdir():
            os.replace(path, folder / path.name)


def small_model_json(config: dict[str, Any], wanted: DecoderConfig) -> dict[str, Any]:
    """The target's config.json made into the small model's."""
    result = config | {"num_hidden_layers": wanted.num_layers, "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    if any(window is not None for window in wanted.windows) or "layer_types" in config:
        result["layer_types"] = [
            "full_attention" if window is None else "sliding_attention" for window in wanted.windows
        ]
        result.pop("max_window_layers", None)
    if config.get("model_type") == "smollm3":  # the only family that leaves layers without rotary positions
        result["no_rope_layers"] = [int(rotated) for rotated in wanted.rotary]
    assert config_from_hf(result) == wanted, "the written configuration must read back as it was meant"
    return result
