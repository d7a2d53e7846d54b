"""Runs transformers' `generate` on the same weights, the second reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class HfRun:
    """Result of one call of `generate`.

    Attributes:
        outputs: per row, new token ids up to and including the end token.
        token_seconds: seconds from the call to each token (of all rows together).
    """

    outputs: list[list[int]]
    seconds: float
    token_seconds: list[float]


def load_hf(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Loads the model in a target's folder with transformers."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    model.generation_config = GenerationConfig()  # use the call's settings, not the folder's
    return model


def run_hf(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    end_ids: Sequence[int],
) -> HfRun:
    """Generates; pads rows of different lengths on the left, as transformers requires."""
    width = max(len(prompt) for prompt in prompts)
    pad = end_ids[0] if end_ids else 0
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    clock = _Clock()
    settings: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        settings = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    torch.manual_seed(seed)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(end_ids) or None,
            pad_token_id=pad,
            stopping_criteria=[clock],
            **settings,
        )
    seconds = time.perf_counter() - start
    outputs = [_cut(row, end_ids) for row in out[:, width:].tolist()]
    return HfRun(outputs, seconds, [at - start for at in clock.times])


class _Clock:
    """A stopping criterion that never stops and records the time of each call, one per token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _cut(tokens: list[int], end_ids: Sequence[int]) -> list[int]:
    """Cuts after the first end token; the rest is padding."""
    for i, token in enumerate(tokens):
        if token in end_ids:
            return tokens[: i + 1]
    return tokens
