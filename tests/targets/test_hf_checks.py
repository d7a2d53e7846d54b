"""Models that the adapter rejects, by name and with a remedy, and models that it accepts."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from aquiline.targets.hf import HFTarget, target_from_hf
from aquiline.targets.hf_checks import position_limit
from aquiline.targets.target import TargetInput
from tests import tiny
from tests.drafters.loop import run
from tests.targets import hf_models

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def causal(name: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def encoder_decoder() -> nn.Module:
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config).eval()


def multimodal() -> nn.Module:
    text = {**SMALL, "head_dim": 8}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def with_backend(backend: str) -> nn.Module:
    model = hf_models.build("phi3", num_hidden_layers=2)
    model.config._attn_implementation_internal = backend  # As from_pretrained leaves it on a machine that has it.
    return model


MAMBA = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0}
REFUSED = {
    "encoder-decoder": (encoder_decoder, "T5ForConditionalGeneration is an encoder-decoder"),
    "multimodal": (multimodal, "Gemma3ForConditionalGeneration wraps a text model.*load the text model"),
    "mamba": (lambda: causal("Mamba", **MAMBA), "MambaForCausalLM has .* cannot roll back"),
    "hybrid": (
        lambda: causal("Qwen3Next", **SMALL, layer_types=["linear_attention", "full_attention"], num_experts=2),
        "Qwen3NextForCausalLM has layers of type linear_attention, whose cache cannot roll back",
    ),
    "flash 2": (
        lambda: with_backend("flash_attention_2"),
        "'flash_attention_2'.*attn_implementation='sdpa' or 'eager'",
    ),
    "flash 3": (
        lambda: with_backend("flash_attention_3"),
        "'flash_attention_3'.*attn_implementation='sdpa' or 'eager'",
    ),
    "flex": (lambda: with_backend("flex_attention"), "'flex_attention'.*attn_implementation='sdpa' or 'eager'"),
    "alibi": (lambda: hf_models.build("falcon", alibi=True), "FalconForCausalLM .*allowed: position_ids"),
    "bloom": (
        lambda: causal("Bloom", vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
        "BloomForCausalLM .*allowed: position_ids",
    ),
    "training": (lambda: hf_models.build("phi").train(), "PhiForCausalLM is in training mode.*eval"),
    "no head": (lambda: hf_models.build("phi").model, "PhiModel has no LM head"),
    "chunked": (
        lambda: causal("Llama4Text", **SMALL, head_dim=8, intermediate_size_mlp=48, num_local_experts=2),
        "Llama4ForCausalLM has layers of type chunked_attention",
    ),
    "encoder": (
        lambda: causal("Bert", **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
        "BertLMHeadModel .* decode it with transformers",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind: str) -> None:
    build, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message) as caught:
        target_from_hf(build())
    assert "\n" not in str(caught.value)


def test_not_a_transformers_model() -> None:
    with pytest.raises(TypeError, match="Linear is not a transformers model"):
        target_from_hf(nn.Linear(2, 2))


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_the_probe_catches_an_attention_that_ignores_the_tree(ignored: str) -> None:
    model = hf_models.build("phi")
    forward = model.model.forward

    def deaf(input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        kwargs |= {"attention_mask": attention_mask, "position_ids": position_ids}
        return forward(input_ids, **{name: value for name, value in kwargs.items() if name != ignored})

    model.model.forward = deaf
    with pytest.raises(ValueError, match=r"tree .*attn_implementation='eager'"):
        HFTarget(model)


def test_the_probe_catches_an_unknown_head() -> None:
    model = hf_models.build("phi")
    forward = model.forward

    def tripled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits * 3
        return out

    model.forward = tripled
    with pytest.raises(ValueError, match=r"logits .*decode it with transformers"):
        HFTarget(model)


def test_a_model_that_fails_in_the_probe_is_refused_with_its_reason() -> None:
    model = hf_models.build("phi")
    model.lm_head = nn.Linear(7, 97)
    with pytest.raises(ValueError, match=r"PhiForCausalLM cannot run .*shapes.*decode it with transformers"):
        HFTarget(model)


def test_unknown_features_are_refused() -> None:
    target = HFTarget(hf_models.build("phi"))
    tokens, positions, cache = torch.ones(1, 2, dtype=torch.int64), torch.arange(2)[None], target.new_cache(1, 8)
    for feature, message in ((8, "unknown target feature 8"), (7, "before the final norm.*take 6 or")):
        with pytest.raises(ValueError, match=message):
            target.forward(TargetInput(tokens, positions, None, cache, [0], (feature,)))


def test_a_context_that_cannot_fit_is_refused() -> None:
    target = HFTarget(hf_models.build("phi"))
    cache = target.new_cache(1, 8)
    with pytest.raises(ValueError, match=r"context is 128.*shorten the prompt"):
        cache.reserve(128 + 1025)


def test_windows_are_read_from_what_the_model_does() -> None:
    """Granite never applies the window that its configuration may name."""
    for family, expected in {
        "starcoder2": {"": hf_models.WINDOW},
        "gemma3": {"full_attention": None, "sliding_attention": hf_models.WINDOW},
        "granite": {"": None},
    }.items():
        model = hf_models.build(family, sliding_window=hf_models.WINDOW)
        assert HFTarget(model).windows == expected
    longer = hf_models.build("starcoder2", sliding_window=128)  # The context ends before it.
    assert HFTarget(longer).windows == {"": None}


def test_a_window_applied_in_an_unknown_way_is_refused() -> None:
    model = hf_models.build("phi3")
    forward = model.model.forward
    model.config.sliding_window = hf_models.WINDOW - 2

    @functools.wraps(forward)
    def wider(*args: Any, **kwargs: Any) -> Any:
        model.config.sliding_window = hf_models.WINDOW
        out = forward(*args, **kwargs)
        model.config.sliding_window = hf_models.WINDOW - 2
        return out

    model.model.forward = wider
    with pytest.raises(ValueError, match=r"Phi3ForCausalLM applies its sliding window of 6 in an unknown way"):
        HFTarget(model)


def test_dynamic_frequencies_limit_the_context() -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = hf_models.build("olmo2", rope_parameters=scaling)
    assert position_limit(model.config) == (128, True)
    assert HFTarget(model).shape.max_positions == 128


class LowRank(nn.Module):
    """Stands for the wrapper that an adapter library puts around a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, hidden: Any) -> Any:
        return self.base_layer(hidden) + self.up(self.down(hidden))


class Wrapper(nn.Module):
    """The outside of a PEFT model."""

    def __init__(self, model: nn.Module, prompt: bool = False) -> None:
        super().__init__()
        self.base_model = model
        self.active_peft_config = type("Config", (), {"is_prompt_learning": prompt})()

    @property
    def config(self) -> Any:
        return self.base_model.config

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, **kwargs: Any) -> Any:
        return self.base_model(**kwargs)


@pytest.mark.oracle
def test_adapters_pass_through_active() -> None:
    model = copy.deepcopy(tiny.hf_model("llama"))
    prompt = list(range(5, 17))
    before = target_from_hf(model)
    for layer in model.model.layers:
        adapter = LowRank(layer.self_attn.q_proj).double()
        layer.self_attn.q_proj = adapter
    target = target_from_hf(Wrapper(model))
    assert isinstance(target, HFTarget) and not isinstance(before, HFTarget)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
    found, _ = run(target, None, [prompt], [20])
    plain, _ = run(before, None, [prompt], [20])
    assert found[0] == ids.tolist() and found != plain


def test_a_learned_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Wrapper learns a prompt outside the model.*LoRA"):
        target_from_hf(Wrapper(hf_models.build("phi"), prompt=True))


@pytest.mark.oracle
def test_peft() -> None:
    """A LoRA adapter of the library itself."""
    import peft

    model = copy.deepcopy(tiny.hf_model("qwen3"))
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    settings.init_lora_weights = False
    wrapped = peft.get_peft_model(model, settings).eval()
    target = target_from_hf(wrapped)
    assert isinstance(target, HFTarget)
    prompt = list(range(5, 17))
    ids = wrapped.generate(input_ids=torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
    assert run(target, None, [prompt], [20])[0][0] == ids.tolist()
    with wrapped.disable_adapter():
        assert run(target, None, [prompt], [20])[0][0] != ids.tolist()


@pytest.mark.oracle
def test_a_model_dispatched_by_accelerate_passes_through() -> None:
    """Hooks on every block, half of the weights offloaded."""
    accelerate = pytest.importorskip("accelerate")
    model = hf_models.build("phi3")
    prompt = list(range(5, 17))
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    accelerate.cpu_offload(model, torch.device("cpu"))
    target = HFTarget(model)
    assert target.device == torch.device("cpu")
    assert run(target, None, [prompt], [12])[0][0] == ids.tolist()


class Int8Linear(nn.Module):
    """A linear layer as weight-only quantisation leaves it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().amax() / 127
        self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, hidden: Any) -> Any:
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


@pytest.mark.oracle
def test_a_quantised_model_passes_through() -> None:
    """Integer weights below the head, under the names that our own decoder would read."""
    model = copy.deepcopy(tiny.hf_model("llama", torch.float32))
    for layer in model.model.layers:
        layer.mlp.up_proj = Int8Linear(layer.mlp.up_proj)
    target = target_from_hf(model)
    assert isinstance(target, HFTarget)
    prompt = list(range(5, 17))
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert run(target, None, [prompt], [12])[0][0] == ids.tolist()
