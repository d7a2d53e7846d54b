"""Input that once ended in silence, in garbage, or in an error that named something else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import aquiline
from aquiline.sampling import SamplingParams, distribution, draw
from aquiline.verify import LossyRule
from tests import tiny
from tests.command_line import write_target


@pytest.fixture(scope="module")
def loaded() -> aquiline.Loaded:
    return aquiline.load(tiny.hf_model("llama", torch.float32), "prompt-lookup")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", math.inf),
        ("min_new_tokens", 1.5),
        ("top_k", 1.5),
        ("n", True),
        ("seed", 1.5),
        ("seed", "x"),
        ("seed", True),
        ("logprobs", True),
        ("temperature", "warm"),
        ("temperature", None),
        ("stop", b"a"),
        ("stop", ("a", 1)),
        ("stop_token_ids", (1.5,)),
        ("logit_bias", [1]),
        ("logit_bias", {1.5: 2}),
        ("logit_bias", {1: "x"}),
        ("logits_processors", (5,)),
        ("ignore_eos", "no"),
    ],
)
def test_settings_of_another_kind_are_named(loaded: aquiline.Loaded, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name} is .*; allowed: "):
        loaded.generate([1, 2], **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1 << 64), ("logit_bias", {1: math.nan}), ("logit_bias", {1: math.inf})]
)
def test_settings_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*; allowed: "):
        SamplingParams(**{name: value})


def test_integers_of_other_libraries_are_integers(loaded: aquiline.Loaded) -> None:
    expected = loaded.generate([1, 2], max_new_tokens=3).token_ids
    ids = [numpy.int64(1), numpy.int64(2)]
    assert loaded.generate(ids, max_new_tokens=numpy.int32(3)).token_ids == expected


@pytest.mark.parametrize("prompt", [None, 5, {"role": "user", "content": "x"}, {1, 2}, iter([1, 2])])
def test_what_is_no_prompt_is_refused(loaded: aquiline.Loaded, prompt: Any) -> None:
    with pytest.raises(TypeError, match="a prompt is a text"):
        loaded.generate(prompt)


def test_settings_in_place_of_params_are_refused(loaded: aquiline.Loaded) -> None:
    with pytest.raises(TypeError, match="params is 5"):
        loaded.generate([1], 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, 1e-300])
def test_the_coldest_temperatures_are_greedy(temperature: float, top_p: float) -> None:
    logits = torch.tensor([0.5, -3.0, 80.0, 79.0])
    probs = distribution(logits, SamplingParams(temperature=temperature, top_p=top_p))
    assert probs.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("top_p", [1e-45, 1e-300])
def test_the_smallest_nucleus_is_the_likeliest_token(top_p: float) -> None:
    probs = distribution(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(temperature=1.0, top_p=top_p))
    assert draw(probs, 1, 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_barring_every_token_is_refused(loaded: aquiline.Loaded, temperature: float) -> None:
    bars = dict.fromkeys(range(tiny.VOCAB), -math.inf)
    with pytest.raises(ValueError, match="every token"):
        loaded.generate([1, 2], temperature=temperature, logit_bias=bars)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"presence_penalty": 0.1}])
def test_logits_that_are_no_numbers_are_never_a_token(settings: dict[str, Any]) -> None:
    """The NaN arises behind the first token, where a whole tree is judged at once."""
    model = tiny.hf_model.__wrapped__("llama", torch.float32)
    first = aquiline.load(model, None, packed=False).generate([1, 2], max_new_tokens=1).token_ids[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[first] = math.nan
    broken = aquiline.load(model, "prompt-lookup", packed=False)
    bias = {first: 200.0} if settings else {}
    with pytest.raises(ValueError, match="NaN"):
        broken.generate([1, 2], max_new_tokens=4, logit_bias=bias, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft": 5}, "draft is a int"),
        ({"draft": aquiline.PromptLookup}, "draft is a type"),
        ({"draft": tiny.hf_model("llama", torch.float32)}, "draft is a LlamaForCausalLM"),
        ({"tokenizer": "x"}, "tokenizer is 'x'"),
        ({"lossy": "typical"}, "lossy is 'typical'"),
        ({"lossy": LossyRule}, "lossy is"),
        ({"dtype": "float16"}, "dtype is float16, but the model is in torch.float32"),
        ({"dtype": torch.int8}, "int8' is not known|int8 is not known"),
        ({"device": "cuda"}, "device is cuda, but the model is on cpu"),
        ({"device": "nowhere"}, "device is 'nowhere'"),
    ],
)
def test_load_refuses_what_it_would_not_do(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        aquiline.load(tiny.hf_model("llama", torch.float32), **{"draft": None, **settings})


def test_the_dtype_that_a_model_has_may_be_named() -> None:
    assert aquiline.load(tiny.hf_model("llama", torch.float32), None, dtype="float32").target.dtype == torch.float32


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _generation(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "generation_config.json").write_text(text)

    return change


def _integer_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_integer_weights, "lm_head.weight has dtype torch.int8"),
        (_config(hidden_size=-48), "hidden_size is -48"),
        (_config(hidden_size="48"), "hidden_size is '48'"),
        (_config(num_hidden_layers=0), "num_hidden_layers is 0"),
        (_config(max_position_embeddings=0), "max_position_embeddings is 0"),
        (_config(max_position_embeddings=None), "config.json"),
        (_config(rms_norm_eps="x"), "rms_norm_eps is 'x'"),
        (_config(rope_theta="x"), "rope_theta is 'x'"),
        (_config(rope_parameters="x"), "rope_parameters is 'x'"),
        (_config(num_attention_heads=5), "config.json|transformers cannot load"),
        (_generation("{"), "generation_config.json is not valid JSON"),
        (_generation("[]"), "generation_config.json holds a list"),
        (_generation('{"eos_token_id": "x"}'), "eos_token_id 'x'"),
        (_generation('{"do_sample": true, "temperature": "x"}'), "generation_config"),
    ],
)
def test_damaged_targets_are_named(tmp_path: Path, change: Callable[[Path], None], words: str) -> None:
    folder = write_target(tmp_path / "target")
    change(folder)
    with pytest.raises(ValueError, match=words):
        aquiline.load(folder, None, dtype="float32").generate([1, 2], max_new_tokens=1)
