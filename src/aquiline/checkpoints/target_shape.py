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
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError(f"{path} says text_config = {text!r}, expected an object; is it a language model?")
    config = {"max_position_embeddings": 2048, **config, **text}
    sizes: list[int] = []
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        size = config.get(key)
        if type(size) is not int or size < 1:
            raise ValueError(f"{path} says {key} = {size!r}, expected a number ≥ 1; is it a language model?")
        sizes.append(size)
    return TargetShape(*sizes)
