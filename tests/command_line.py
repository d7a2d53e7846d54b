"""Folders for commands to work on, and the command line called in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.cli import main
from aquiline.drafters.eagle_network import DraftHead
from aquiline.models.resolve import target_fingerprint
from tests import tiny
from tests.tiny_tokenizers import every_byte

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Result:
    """Result of a command."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The error, which must be one line and the last one."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and self.err.splitlines()[-1] == lines[0], self.err
        return lines[0]


def call(capsys: pytest.CaptureFixture[str], *words: object) -> Result:
    """Runs `aquiline words…`."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return Result(code, out, err)


def write_target(folder: Path, family: str = "Llama", **changes: Any) -> Path:
    """A random model with a tokenizer that encodes every text and has a chat template."""
    tokenizer = every_byte()
    settings = SIZES | {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0} | changes
    torch.manual_seed(4)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_eagle(folder: Path, kind: str = "eagle3", target: Path | None = None, **changes: Any) -> Path:
    """A random head for `write_target`'s model; with `target`, one that says it was trained for it."""
    vocabulary = len(every_byte())
    drafted = vocabulary if kind == "eagle" else 64
    settings = {"vocab_size": vocabulary, "draft_vocab_size": drafted, "dtype": torch.float32} | changes
    made = tiny.head(kind, **settings)
    fingerprint = None if target is None else target_fingerprint(target)
    ids = None if kind == "eagle" else torch.arange(1, drafted + 1)
    write_head(folder, DraftHead(made.network, ids, target_fingerprint=fingerprint), torch.float32)
    return folder
