"""Sizes of a target from its configuration alone, without loading it."""

from __future__ import annotations

from pathlib import Path

from aquiline.checkpoints.head_files import read_json
from aquiline.targets.target import TargetShape


def target_shape(folder: str | Path) -> TargetShape:
    """Reads the sizes that a head must fit out of a target's config.json.

    Args:
        folder: the target's folder; for multimodal targets the text model's sizes count.

    Raises:
        ValueError: if there is no config.json or it names no sizes.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a target's folder: it has no config.json")
    config = read_json(path)
    config = {**config, **config.get("text_config", {})}
    sizes = [config.get(key) for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")]
    for key, size in zip(("vocab_size", "hidden_size", "num_hidden_layers"), sizes, strict=False):
        if not isinstance(size, int):
            raise ValueError(f"{path} says {key} = {size!r}, expected a number; is it a language model?")
    return TargetShape(int(sizes[0] or 0), int(sizes[1] or 0), int(sizes[2] or 0), int(sizes[3] or 2048))
