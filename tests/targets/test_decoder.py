"""A config.json is read as transformers reads it: defaults, ignored settings, context lengths, contradictions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from aquiline.models.resolve import target_fingerprint
from aquiline.targets.decoder import FAMILIES, FAMILY_DEFAULTS, Decoder, DecoderConfig, config_from_hf, load_state
from aquiline.targets.hf import target_from_hf
from aquiline.targets.loading import load_target, target_shape
from aquiline.targets.target import TargetInput
from tests import tiny

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
# The families' default sizes are those of models of 30 layers and more, which no file leaves out.

SMALL: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def as_meant(config: dict[str, Any]) -> DecoderConfig:
    """Without the rope parameters as they were spelled."""
    found = config_from_hf(config)
    return replace(found, layer=replace(found.layer, rope=replace(found.layer.rope, scaling=None)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_setting_left_out_is_the_one_of_the_family(family: str) -> None:
    made = getattr(transformers, f"{CLASSES[family]}Config")
    full = made().to_dict()
    if family != "llama":
        full |= {"use_sliding_window": True, "sliding_window": 17}
    full["model_type"] = family
    full.pop("layer_types", None)
    for left_out in [None, *sorted(full.keys() - SIZES - {"model_type"})]:
        given = {key: value for key, value in full.items() if key != left_out}
        expected = made(**{key: value for key, value in given.items() if key != "model_type"}).to_dict()
        assert as_meant(given) == as_meant(expected), left_out
        assert FAMILY_DEFAULTS[family].get("eos_token_id") == made().eos_token_id
    for size in SIZES:
        with pytest.raises(KeyError, match=size):
            config_from_hf({key: value for key, value in full.items() if key != size})


UNUSUAL: dict[str, dict[str, Any]] = {
    "partial": {"partial_rotary_factor": 0.5},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "window": {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 3},
    "unused window": {"sliding_window": 12, "use_sliding_window": False},
    "layer types": {
        "sliding_window": 12,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
    },
    "rope_scaling": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0},
    "yarn without factor": {
        "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16, "factor": None}
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", UNUSUAL)
def test_settings_mean_what_they_mean_in_transformers(family: str, case: str) -> None:
    """Also those that a family ignores, such as half-rotated heads of a Llama."""
    config = getattr(transformers, f"{CLASSES[family]}Config")(**SMALL, **UNUSUAL[case])
    torch.manual_seed(0)
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config).eval().double()
    written = json.loads(config.to_json_string()) | UNUSUAL[case]
    if "rope_scaling" in UNUSUAL[case]:
        del written["rope_parameters"]
    own = Decoder(config_from_hf(written)).double().eval()
    load_state(own, model.state_dict(), family)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = model(ids).logits
        found = own(TargetInput(ids, ids.clone(), None, own.new_cache(1, 40), [0])).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_entries_for_other_layers_are_refused() -> None:
    base = SMALL | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}
    with pytest.raises(ValueError, match=r"layer_types is .*7 layers"):
        config_from_hf(base | {"layer_types": ["full_attention"]})
    with pytest.raises(ValueError, match=r"no_rope_layers is .*7 layers"):
        config_from_hf(SMALL | {"model_type": "smollm3", "no_rope_layers": [1]})


# -- context -----------------------------------------------------------------------------------

LENGTHS: list[tuple[dict[str, Any], int]] = [
    ({"rope_type": "default"}, 64),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ({"rope_type": "yarn", "factor": 4.0}, 256),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ({"rope_type": "yarn", "original_max_position_embeddings": 16}, 64),
    ({"rope_type": "linear", "factor": 2.0}, 128),
    ({"rope_type": "dynamic", "factor": 4.0}, 64),
    ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}, 32),
]


@pytest.mark.parametrize(("rope", "length"), LENGTHS)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_context_is_the_one_of_the_recipe(rope: dict[str, Any], length: int, key: str, tmp_path: Path) -> None:
    config = SMALL | {"model_type": "llama", key: rope}
    assert config_from_hf(config).max_positions == length
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert target_shape(tmp_path).max_positions == length


def test_a_prompt_beyond_the_length_in_training_generates_as_transformers_does() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(**SMALL, rope_parameters=rope)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().double()
    target = target_from_hf(model)
    assert target.shape.max_positions == 256
    ids = torch.arange(200)[None] % tiny.VOCAB
    with torch.no_grad():
        found = target.forward(TargetInput(ids, torch.arange(200)[None], None, target.new_cache(1, 200), [0])).logits
        torch.testing.assert_close(found, model(ids).logits, atol=1e-5, rtol=1e-4)


# -- files that contradict each other ----------------------------------------------------------


def saved(folder: Path, family: str = "llama-bias-tied") -> Path:
    tiny.hf_model(family, torch.float32).save_pretrained(folder)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_an_lm_head_in_the_file_is_used_whatever_the_config_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "target")
    tensors, before = load_file(folder / "model.safetensors"), target_fingerprint(folder)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    same = load_target(folder, torch.float32)
    assert same.lm_head.weight is same.embed_tokens.weight and not caplog.records  # type: ignore[attr-defined]
    assert target_fingerprint(folder) == before
    save_file(tensors | {"lm_head.weight": head.flip(0)}, folder / "model.safetensors", metadata={"format": "pt"})
    target = load_target(folder, torch.float32)
    assert "lm_head.weight differs" in caplog.text and target_fingerprint(folder) != before
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        found = target.forward(TargetInput(ids, ids.clone(), None, target.new_cache(1, 12), [0])).logits
        torch.testing.assert_close(found, theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers 1000000000.*fetch"),
        ({"num_hidden_layers": 6}, "num_hidden_layers 6, the weights have 7 layers"),
        ({"vocab_size": 10**12}, "vocab_size 1000000000000.*fetch"),
        ({"vocab_size": 98}, r"embed_tokens.weight has shape \(97, 48\), expected \(98, 48\)"),
        ({"intermediate_size": 10**10}, r"gate_proj.weight has shape.*10000000000"),
        ({"num_attention_heads": 10**9, "head_dim": 12}, "q_proj|divide"),
        ({"num_key_value_heads": 4}, "k_proj.weight has shape"),
        ({"model_type": "phi3", "num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0; allowed"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta = nan; allowed"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor = 'x'; allowed"),
        ({"rope_scaling": {"type": "linear"}}, "factor = None; allowed"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor = None; allowed"),
        ({"model_type": None}, "model_type is None; allowed"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]; allowed"),
        ({"model_type": "unheard-of"}, "transformers cannot load.*unheard-of"),
    ],
    ids=str,
)
def test_sizes_that_the_weights_do_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "target")
    edit(folder, **changes)
    with pytest.raises(ValueError, match=words) as caught:
        load_target(folder, torch.float32)
    assert str(folder) in str(caught.value)


def test_one_file_goes_before_an_index(tmp_path: Path) -> None:
    """As in transformers: the index is left from an earlier save."""
    folder = saved(tmp_path / "target")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert isinstance(load_target(folder, torch.float32), Decoder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_a_target_is_not_a_link_out_of_its_folder(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "target")
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=f"{name} is a link that leaves.*copy"):
        load_target(folder, torch.float32)
    hub = tmp_path / "models--a--b"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots").mkdir()
    folder.rename(hub / "snapshots" / "1234")
    (hub / "snapshots" / "1234" / name).unlink()
    (tmp_path / "outside").rename(hub / "blobs" / "5678")
    (hub / "snapshots" / "1234" / name).symlink_to(Path("../../blobs/5678"))
    assert isinstance(load_target(hub / "snapshots" / "1234", torch.float32), Decoder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "generation_config.json"])
def test_a_file_nested_too_deeply_is_named(name: str, tmp_path: Path) -> None:
    import aquiline

    folder = saved(tmp_path / "target")
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ValueError, match=name):
        aquiline.load(folder, None, tokenizer=len)
