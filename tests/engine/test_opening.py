"""The model's defaults are those that transformers would generate with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from aquiline.engine.opening import generation_defaults
from aquiline.sampling import SamplingParams


def folder(path: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2"} | (config or {})))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.6, "top_p": 0.9}, SamplingParams()),
        ({"repetition_penalty": 1.3}, SamplingParams(repetition_penalty=1.3)),
        ({"do_sample": True}, SamplingParams(temperature=1.0, top_k=50)),
        ({"do_sample": True, "top_k": 0, "temperature": None}, SamplingParams(temperature=1.0)),
        ({"do_sample": True, "temperature": 0.0}, SamplingParams(top_k=50)),
        (
            {
                "do_sample": True,
                "temperature": 0.7,
                "top_k": 20,
                "top_p": 0.8,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
            },
            SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.1),
        ),
    ],
    ids=str,
)
def test_sampling(generation: dict[str, Any], expected: SamplingParams, tmp_path: Path) -> None:
    assert generation_defaults(folder(tmp_path, generation), None, None)[1] == expected


@pytest.mark.parametrize(
    ("generation", "config", "own", "ends"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 9}, None, (5, 6)),
        ({"eos_token_id": 5}, {}, 7, (5, 7)),
        ({"eos_token_id": [5, 7]}, {}, 7, (5, 7)),
        ({}, {"eos_token_id": 9}, 7, (7,)),
        (None, {"eos_token_id": [2, 0]}, 2, (2, 0)),
        (None, {"eos_token_id": [2, 0]}, None, (2, 0)),
        (None, {"model_type": "llama"}, None, (2,)),
        (None, {"model_type": "llama", "eos_token_id": None}, None, ()),
        (None, {"model_type": "gemma3", "text_config": {"eos_token_id": 4}}, None, (4,)),
    ],
    ids=str,
)
def test_ends(
    generation: dict[str, Any] | None, config: dict[str, Any], own: int | None, ends: tuple[int, ...], tmp_path: Path
) -> None:
    tokenizer = SimpleNamespace(eos_token_id=own)
    assert generation_defaults(folder(tmp_path, generation, config), None, tokenizer)[0] == ends


def test_a_model_object_has_the_same_ends_as_its_folder(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(eos_token_id=[2, 0])
    model = SimpleNamespace(generation_config=transformers.GenerationConfig.from_model_config(config))
    config.save_pretrained(tmp_path)
    assert generation_defaults(tmp_path, None, None)[0] == generation_defaults(None, model, None)[0] == (2, 0)


def test_settings_without_a_counterpart_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generation_defaults(folder(tmp_path, {"no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0}), None, None)
    assert not caplog.records
    generation_defaults(folder(tmp_path, {"no_repeat_ngram_size": 3, "num_beams": 4}), None, None)
    assert "no_repeat_ngram_size, num_beams" in caplog.text


def test_values_that_are_not_allowed_name_the_file(tmp_path: Path) -> None:
    for bad in (
        {"eos_token_id": "x"},
        {"do_sample": "false"},
        {"do_sample": True, "top_p": 7.0},
        {"repetition_penalty": -1},
    ):
        with pytest.raises(ValueError, match=r"generation_config\.json"):
            generation_defaults(folder(tmp_path, bad), None, None)
