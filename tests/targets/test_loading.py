"""From a folder or a transformers model to a target: which one, and that nothing is copied or trusted blindly."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from aquiline import decode
from aquiline.drafters.lookup import PromptLookup
from aquiline.models.embedded import fetch_embedded
from aquiline.stats import GenerationStats
from aquiline.targets.decoder import Decoder
from aquiline.targets.hf import HFTarget, target_from_hf
from aquiline.targets.loading import load_target, target_shape
from aquiline.targets.target import TargetInput, TargetShape
from tests import tiny
from tests.drafters.loop import run
from tests.targets import hf_models

PROMPT = list(range(5, 20))


def texts(*targets: Any) -> list[list[int]]:
    return [run(target, None, [PROMPT], [16])[0][0] for target in targets]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_our_families_share_their_parameters(family: str) -> None:
    model = tiny.hf_model(family)
    target = target_from_hf(model)
    assert isinstance(target, Decoder)
    own, theirs = dict(target.named_parameters()), dict(model.model.named_parameters())
    assert all(own[name].data_ptr() == theirs[name].data_ptr() for name in theirs)
    assert target.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert (target.lm_head.weight is target.embed_tokens.weight) == model.config.tie_word_embeddings
    assert all(parameter.requires_grad for parameter in model.parameters()), "the user's model was changed"
    found, expected = texts(target, HFTarget(model))
    assert found == expected


class Renamed(nn.Linear):
    """A linear layer of somebody else's."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 1.01


def other_layer(model: Any) -> None:
    old = model.model.layers[3].mlp.up_proj
    model.model.layers[3].mlp.up_proj = Renamed(old.in_features, old.out_features, bias=False).to(old.weight.dtype)


def patched_forward(model: Any) -> None:
    layer = model.model.layers[2].mlp
    forward = layer.forward
    layer.forward = lambda hidden: forward(hidden) * 1.5


def hooked(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)


def mixed_dtypes(model: Any) -> None:
    model.lm_head.float()


UNUSUAL = {"layer": other_layer, "patch": patched_forward, "hook": hooked, "dtypes": mixed_dtypes}


@pytest.mark.parametrize("change", UNUSUAL)
def test_anything_unusual_goes_through_the_modeling_code(change: str) -> None:
    model = copy.deepcopy(tiny.hf_model("qwen3"))
    if change != "dtypes":
        UNUSUAL[change](model)
        target = target_from_hf(model)
        assert isinstance(target, HFTarget)
        ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)[0, len(PROMPT) :]
        assert texts(target) == [ids.tolist()]
        return
    UNUSUAL[change](model)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM cannot run"):  # Nor can transformers.
        target_from_hf(model)


def test_hooks_of_transformers_itself_are_no_change() -> None:
    """Asking a model for hidden states once leaves transformers' own hooks on it."""
    model = copy.deepcopy(tiny.hf_model("llama"))
    model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert isinstance(target_from_hf(model), Decoder)


def test_a_decoder_that_disagrees_is_not_taken() -> None:
    """A configuration that says less than the module does."""
    model = copy.deepcopy(tiny.hf_model("llama"))
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 17.0}  # The buffers keep the old.
    assert isinstance(target_from_hf(model), HFTarget)


@pytest.mark.parametrize("shards", [None, "20KB"])
@pytest.mark.parametrize("family", ["llama-bias-tied", "qwen2"])
def test_a_folder_of_our_families(tmp_path: Path, family: str, shards: str | None) -> None:
    model = tiny.hf_model(family, torch.float32)
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shards is not None)
    target = load_target(tmp_path, torch.float64)
    assert isinstance(target, Decoder) and target.dtype == torch.float64
    assert (target.lm_head.weight is target.embed_tokens.weight) == (family == "llama-bias-tied")
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert texts(target) == texts(target_from_hf(copy.deepcopy(model).double()))


@pytest.mark.parametrize("family", ["gemma3", "mixtral"])
def test_a_folder_of_another_family(tmp_path: Path, family: str) -> None:
    model = hf_models.build(family)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, torch.float32)
    assert isinstance(target, HFTarget) and target.dtype == torch.float32
    assert texts(target) == texts(HFTarget(model))


def test_a_setting_that_our_decoder_lacks_goes_to_the_adapter(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny.hf_model("llama", torch.float32))
    half = model.config.head_dim // 2
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * half, "long_factor": [2.0] * half}
    model.config.rope_parameters = {**scaling, "original_max_position_embeddings": 64}
    model.config.max_position_embeddings = 256
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, torch.float32)
    assert isinstance(target, HFTarget) and target.shape.max_positions == 64


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)


def missing_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def misshapen(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    save_file(tensors, folder / "model.safetensors")


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")


def poor_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


BROKEN = {
    "truncated": (truncated, r"model.safetensors is not a whole safetensors file .*fetch it again"),
    "no header": (no_header, r"model.safetensors is not a whole safetensors file .*fetch it again"),
    "missing tensor": (missing_tensor, r"norm.weight is missing.*fetch it again"),
    "misshapen": (misshapen, r"norm.weight has shape \(5,\), expected \(48,\)"),
    "broken config": (broken_config, r"config.json is not valid JSON.*fetch it again"),
    "poor config": (poor_config, r"config.json lacks 'hidden_size'.*fetch it again"),
    "no weights": (no_weights, r"lacks model.safetensors"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_folders_are_named(tmp_path: Path, kind: str) -> None:
    damage, message = BROKEN[kind]
    tiny.hf_model("llama", torch.float32).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        load_target(tmp_path, torch.float32)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("kind", ["truncated", "missing tensor", "misshapen"])
def test_broken_folders_of_other_families_are_named(tmp_path: Path, kind: str) -> None:
    """transformers itself fills what is missing with random numbers; that is no target."""
    hf_models.build("phi3").save_pretrained(tmp_path)
    BROKEN[kind][0](tmp_path)
    with pytest.raises(ValueError, match=r"fetch it again") as caught:
        load_target(tmp_path, torch.float32)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, r"hidden_size = None, expected a number ≥ 1"),
        ({"vocab_size": -1}, r"vocab_size = -1, expected a number ≥ 1"),
        ({"num_hidden_layers": True}, r"num_hidden_layers = True, expected a number ≥ 1"),
        ({"max_position_embeddings": "x"}, r"max_position_embeddings = 'x', expected a number ≥ 1"),
        ({"text_config": [1]}, r"text_config = \[1\], expected an object"),
    ],
)
def test_a_target_without_sizes(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 10}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert target_shape(tmp_path) == TargetShape(40, 16, 10, 2048)
    (tmp_path / "config.json").write_text(json.dumps(sizes | changes))
    with pytest.raises(ValueError, match=message) as caught:
        target_shape(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.real
def test_the_adapter_and_our_decoder_agree_on_smollm2(smollm2_folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    adapter, own = HFTarget(model), target_from_hf(model)
    assert isinstance(own, Decoder)
    tokens = torch.tensor([[1, 4093, 198, 3725, 314, 260, 3575, 282, 4649, 47]])
    positions = torch.arange(tokens.shape[1])[None]
    found, expected = (
        target.forward(TargetInput(tokens, positions, None, target.new_cache(1, 16), [0], (2, 15, "final")))
        for target in (adapter, own)
    )
    assert found.features is not None and expected.features is not None
    torch.testing.assert_close(found.logits, expected.logits, atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(found.features, expected.features, atol=5e-3, rtol=1e-3)


@pytest.mark.real
def test_gemma3_with_prompt_lookup_equals_transformers() -> None:
    """A real model of another family, its context beyond the window of 512 tokens."""
    from tokenizers import Tokenizer

    folder = fetch_embedded("gemma3-270m")
    target = load_target(folder, torch.float32)
    assert isinstance(target, HFTarget) and set(target.windows.values()) == {None, 512}
    text = "Copy the list exactly.\n" + "apple, river, stone, violin, cloud, lantern;\n" * 44
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert len(prompt) > 520
    ids = target.model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
    stats, drafter = GenerationStats(), PromptLookup(depth=5, num_branches=2)
    state = decode.new_state(target, drafter, 1, 600)
    request = decode.Occupant(list(prompt), tiny.chooser(prompt), stats)
    list(decode.prefill(target, drafter, state, 0, request))
    found = request.tokens[-1:]
    while len(found) < 16:
        found += decode.step(target, drafter, state, [0])[0].tokens
    assert found[:16] == ids.tolist()
    assert stats.accepted > 0


def test_models_that_cannot_be_targets(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match=r"t5 is an encoder-decoder .*allowed: decoder-only"):
        load_target(tmp_path / "t5", torch.float32)
    small = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    transformers.ViTModel(small).save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match=r"not a causal language model .*'vit'.*allowed"):
        load_target(tmp_path / "vit", torch.float32)


@pytest.mark.parametrize("quantisation", [{"quant_method": "gptq"}, [1], {"quant_method": "compressed-tensors"}])
def test_quantised_weights_that_transformers_cannot_read(tmp_path: Path, quantisation: Any) -> None:
    tiny.hf_model("llama", torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    with pytest.raises(ValueError, match=r"transformers cannot load .*; (fetch it again|install the package)"):
        load_target(tmp_path, torch.float32)
