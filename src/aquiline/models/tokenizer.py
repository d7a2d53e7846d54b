"""Loads a model folder's tokenizer without importing modeling code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aquiline.models.files import read_json

_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")
# The class's names before and since transformers 5.


def load_tokenizer(folder: str | Path) -> Any:
    """Loads the Hugging Face tokenizer in a folder.

    `AutoTokenizer` imports the family's modeling code to find the class. If the configuration already
    names the general class, this is skipped, which saves a second.

    Raises:
        ValueError: if there is no tokenizer, or it is broken.
    """
    folder = Path(folder)
    try:
        name = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
    except (OSError, ValueError, AttributeError, RecursionError):
        name = None  # transformers reports the error
    try:
        if name in _GENERAL and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{folder} has no tokenizer that transformers can load ({reason}); put tokenizer.json and "
            "tokenizer_config.json there, or pass tokenizer="
        ) from error


def token_table(folder: Path) -> dict[int, str] | None:
    """Returns id → token as tokenizer.json holds them; None without that file.

    Raises:
        ValueError: if the file is broken.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    document = read_json(file)
    try:
        vocabulary, added = document["model"]["vocab"], document.get("added_tokens") or []
        # A list holds (token, score), in the order of the ids.
        if isinstance(vocabulary, list):
            vocabulary = {each[0]: number for number, each in enumerate(vocabulary)}
        table = {int(number): str(token) for token, number in vocabulary.items()}
        return table | {int(token["id"]): str(token["content"]) for token in added}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{file} has no vocabulary that can be read ({error!r}); fetch it again") from error
