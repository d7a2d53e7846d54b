"""Heads as others write them are recognised, and what they say is understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aquiline.checkpoints.eagle.reading import HeadChoices
from aquiline.checkpoints.open import open_head, stored_eagle
from tests.checkpoints import head_fixtures as fixtures
from tests.checkpoints.head_fixtures import DEFAULT_FEATURES, IDS, TARGET, VD, H, V


def _eagle3(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    settings = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD} | changes
    return fixtures.write(folder, fixtures.llama_config(**settings), tensors or fixtures.eagle3())


def _old_speculators() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": fixtures.llama_config(),
        "layernorms": False,
        "fusion_bias": True,
    }
    return config, fixtures.eagle1("transformer", "fusion_fc", bias=True, embedding=False)


def _nested_vllm() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """vLLM's own conversion: the layer's config inside `model`, the target's LM head in the file."""
    config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "eagle_fc_bias": True}
    config["model"] = fixtures.llama_config()
    tensors = {f"model.{n}" if n.startswith("layers") else n: t for n, t in fixtures.eagle1(bias=True).items()}
    return config, tensors | {"lm_head.weight": torch.zeros(V, H)}


def _named(architecture: str, **changes: Any) -> dict[str, Any]:
    return fixtures.llama_config(architectures=[architecture], **changes)


DIALECTS: dict[str, tuple[str, str, Any, Any]] = {
    "safeailab-1": ("safeailab", "eagle", lambda: _named("LlamaForCausalLM", bias=False), fixtures.eagle1),
    "safeailab-3": (
        "safeailab",
        "eagle3",
        lambda: _named("LlamaForCausalLM", draft_vocab_size=VD, torch_dtype=...),
        fixtures.eagle3,
    ),
    "vllm-1": ("vllm", "eagle", lambda: _named("EagleLlamaForCausalLM"), lambda: fixtures.eagle1(embedding=False)),
    "sglang-1": ("sglang", "eagle", lambda: _named("LlamaForCausalLMEagle"), lambda: fixtures.eagle1(bias=True)),
    "sglang-3": (
        "sglang",
        "eagle3",
        lambda: _named("LlamaForCausalLMEagle3", draft_vocab_size=VD, pretraining_tp=1),
        fixtures.eagle3,
    ),
    "speculators-3": ("speculators", "eagle3", fixtures.speculators_config, lambda: fixtures.eagle3("layers.0")),
    "modelopt-3": ("modelopt", "eagle3", fixtures.modelopt_config, lambda: fixtures.eagle3("layers.0")),
    "angelslim-3": (
        "angelslim",
        "eagle3",
        lambda: _named(
            "Eagle3LlamaForCausalLM",
            draft_vocab_size=VD,
            head_dim=4,
            rope_scaling=None,
            rope_theta=1000000,
            tie_word_embeddings=True,
        ),
        fixtures.eagle3,
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_recognised(name: str, tmp_path: Path) -> None:
    dialect, kind, config, tensors = DIALECTS[name]
    given = tensors()
    head, report = fixtures.opened(fixtures.write(tmp_path / "head", config(), given), TARGET)
    assert (report.dialect, report.config.kind) == (dialect, kind)
    assert report.config.features == (("final",) if kind == "eagle" else DEFAULT_FEATURES)
    first = head.network.attention(0).q_proj.weight
    assert torch.equal(first, next(t for n, t in given.items() if n.endswith("q_proj.weight")))
    if kind == "eagle3":
        assert torch.equal(head.draft_to_target, IDS)
    assert dialect in str(report)


@pytest.mark.parametrize("make", [_old_speculators, _nested_vllm])
def test_nested_eagle1(make: Any, tmp_path: Path) -> None:
    config, tensors = make()
    head, report = fixtures.opened(fixtures.write(tmp_path, config, tensors), TARGET)
    assert report.config.kind == "eagle" and report.config.fc_bias
    assert torch.equal(head.network.fc.bias, tensors.get("fc.bias", tensors.get("fusion_fc.bias")))
    assert "lm_head" not in str(dict(head.network.named_parameters()).keys())


@pytest.mark.parametrize("pickled", [False, True])
def test_pickle_and_safetensors_and_shards_are_one(pickled: bool, tmp_path: Path) -> None:
    config, tensors = DIALECTS["safeailab-3"][2](), fixtures.eagle3()
    one, _ = fixtures.opened(fixtures.write(tmp_path / "a", config, tensors, pickled=pickled), TARGET)
    two, report = fixtures.opened(fixtures.shard(tmp_path / "b", config, tensors), TARGET)
    assert len(report.files) == 4
    for (name, left), right in zip(one.network.named_parameters(), two.network.parameters(), strict=True):
        assert torch.equal(left, right), name


def test_hub_snapshot_links_are_inside(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    fixtures.write(snapshot, DIALECTS["safeailab-3"][2](), fixtures.eagle3())
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "0")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0")
    assert open_head(snapshot, TARGET).report.config.kind == "eagle3"


# -- the vocabulary map ---------------------------------------------------------------------


def test_map_from_t2d_alone(tmp_path: Path) -> None:
    tensors = fixtures.eagle3()
    del tensors["d2t"]
    head, report = fixtures.opened(_eagle3(tmp_path, tensors), TARGET)
    assert torch.equal(head.draft_to_target, IDS) and "t2d" in report.vocabulary


def test_map_without_t2d_is_an_offset(tmp_path: Path) -> None:
    tensors = fixtures.eagle3()
    del tensors["t2d"]
    head, _ = fixtures.opened(_eagle3(tmp_path, tensors), TARGET)
    assert torch.equal(head.draft_to_target, IDS)


def test_absolute_map_is_told_by_t2d(tmp_path: Path) -> None:
    ids = torch.arange(0, 2 * VD, 2)  # as offsets these would be legal as well: 0, 3, 6, …
    tensors = fixtures.eagle3() | {"d2t": ids, "t2d": torch.zeros(V, dtype=torch.bool)}
    tensors["t2d"][ids] = True
    head, report = fixtures.opened(_eagle3(tmp_path, tensors), TARGET)
    assert torch.equal(head.draft_to_target, ids) and "absolute" in report.vocabulary


def test_absolute_map_is_told_by_its_range(tmp_path: Path) -> None:
    tensors = fixtures.eagle3() | {"d2t": IDS}  # 39 + 11 is no token
    del tensors["t2d"]
    head, report = fixtures.opened(_eagle3(tmp_path, tensors), TARGET)
    assert torch.equal(head.draft_to_target, IDS) and "absolute" in report.vocabulary


@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_draft_vocabulary_equal_to_the_targets(with_zeros: bool, named: bool, tmp_path: Path) -> None:
    tensors = fixtures.eagle3(vd=V)
    if with_zeros:
        tensors |= {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.zeros(V, dtype=torch.bool)}
    head, report = fixtures.opened(_eagle3(tmp_path, tensors, draft_vocab_size=V if named else None), TARGET)
    assert head.draft_to_target is None and report.config.draft_vocab_size == V


# -- features, norms, rope, biases ----------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "nested", "features"),
    [
        ([2, 5, 7], None, (2, 5, 7)),
        ([1, 4, 6], None, (1, 4, 6)),  # boundaries, as vLLM and llama.cpp read the top level
        (None, [1, 4, 6], (2, 5, 7)),  # outputs
        (None, [2, 5, 7], (2, 5, 7)),  # boundaries: the list does not start with 1
        (None, [4, 8, 10], (4, 8, 10)),  # boundaries up to the last one
        (None, None, DEFAULT_FEATURES),
    ],
)
def test_layer_ids(top: list[int] | None, nested: list[int] | None, features: tuple[int, ...], tmp_path: Path) -> None:
    extra: dict[str, Any] = {} if top is None else {"eagle_aux_hidden_state_layer_ids": top}
    if nested:
        extra["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": nested, "use_aux_hidden_state": True}
    report = open_head(_eagle3(tmp_path, **extra), TARGET).report
    assert report.config.features == features
    suspicious = [note for note in report.notes if "below the default" in note]
    assert bool(suspicious) == (features == (1, 4, 6))


def test_layer_ids_can_be_overruled(tmp_path: Path) -> None:
    folder = _eagle3(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 4, 6])
    assert open_head(folder, TARGET, HeadChoices(layer_ids="output")).report.config.features == (2, 5, 7)
    with pytest.raises(ValueError, match="allowed: boundary, output"):
        open_head(folder, TARGET, HeadChoices(layer_ids="input"))


def test_four_features(tmp_path: Path) -> None:
    folder = _eagle3(tmp_path, fixtures.eagle3(features=4), eagle_aux_hidden_state_layer_ids=[1, 3, 5, 10])
    assert open_head(folder, TARGET).report.config.features == (1, 3, 5, 10)


def test_norm_before_residual_defaults_to_false_and_says_so(tmp_path: Path) -> None:
    config = fixtures.speculators_config(norm_before_residual=...)
    folder = fixtures.write(tmp_path, config, fixtures.eagle3("layers.0"))
    silent = open_head(folder, TARGET).report
    assert not silent.config.norm_before_residual and "vLLM would read true" in str(silent)
    overruled = open_head(folder, TARGET, HeadChoices(norm_before_residual=True)).report
    assert overruled.config.norm_before_residual
    said = fixtures.speculators_config(norm_before_residual=True)
    report = open_head(fixtures.write(tmp_path, said, fixtures.eagle3("layers.0")), TARGET).report
    assert report.config.norm_before_residual and not report.notes


def test_norms_of_3_1(tmp_path: Path) -> None:
    norms = {f"fc_norm.{i}.weight": torch.ones(H) for i in range(3)}
    folder = _eagle3(tmp_path / "a", fixtures.eagle3() | norms, fc_norm=True, norm_output=True)
    config = open_head(folder, TARGET).report.config
    assert config.fc_norm and config.norm_output and not config.norm_before_fc
    one = {"input_norm.weight": torch.ones(3 * H)}
    inside = {"norm_before_fc": True}
    folder = _eagle3(tmp_path / "b", fixtures.eagle3() | one, eagle_config=inside)
    assert open_head(folder, TARGET).report.config.norm_before_fc


def test_norms_that_the_config_does_not_announce(tmp_path: Path) -> None:
    norms = {f"fc_norm.{i}.weight": torch.ones(H) for i in range(3)}
    with pytest.raises(ValueError, match=r"fc_norm\.0\.weight.*does not say \"fc_norm\": true"):
        open_head(_eagle3(tmp_path, fixtures.eagle3() | norms), TARGET)


def test_rope_base(tmp_path: Path) -> None:
    silent = open_head(_eagle3(tmp_path / "a"), TARGET).report
    assert silent.config.layer.rope.theta == 10000 and "names no rope base" in str(silent)
    named = open_head(_eagle3(tmp_path / "b", rope_theta=5000.0), TARGET).report
    assert named.config.layer.rope.theta == 5000 and not named.notes
    parameters = {"rope_theta": 7000.0, "rope_type": "default"}
    new = open_head(_eagle3(tmp_path / "c", rope_parameters=parameters), TARGET).report
    assert new.config.layer.rope.theta == 7000
    angelslim = fixtures.write(tmp_path / "d", DIALECTS["angelslim-3"][2](), fixtures.eagle3())
    assert "accept more with 10000" in str(open_head(angelslim, TARGET).report)
    assert open_head(angelslim, TARGET, HeadChoices(rope_theta=10000.0)).report.config.layer.rope.theta == 10000


def test_rope_scaling_as_modelopt_injects_it(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048, "rope_theta": 5000.0}
    folder = _eagle3(tmp_path, rope_theta=5000.0, rope_scaling=yarn)
    rope = open_head(folder, TARGET).report.config.layer.rope
    assert (rope.kind, rope.scaling["factor"], rope.original_max_positions) == ("yarn", 32.0, 2048)


def test_two_rope_bases_are_one_too_many(tmp_path: Path) -> None:
    both = {"rope_theta": 5000.0, "rope_parameters": {"rope_theta": 10000.0}}
    with pytest.raises(ValueError, match=r"rope_theta 5000.*rope_parameters.rope_theta 10000"):
        open_head(_eagle3(tmp_path, **both), TARGET)


@pytest.mark.parametrize(
    ("bias_key", "tensor", "outcome"),
    [
        (..., True, True),  # absent means present
        (True, True, True),
        (False, False, False),
        (..., False, False),
        (True, False, "fc.bias is missing"),
        (False, True, "would drop it"),
    ],
)
def test_fc_bias(bias_key: Any, tensor: bool, outcome: bool | str, tmp_path: Path) -> None:
    folder = fixtures.write(tmp_path, fixtures.llama_config(bias=bias_key), fixtures.eagle1(bias=tensor))
    if isinstance(outcome, str):
        with pytest.raises(ValueError, match=outcome):
            open_head(folder, TARGET)
        return
    report = open_head(folder, TARGET).report
    assert report.config.fc_bias == outcome
    assert ("adds a random one" in str(report)) == (bias_key is ... and not tensor)


def test_qkv_bias_of_qwen2_heads(tmp_path: Path) -> None:
    biases = {f"layers.0.self_attn.{p}_proj.bias": torch.ones(n) for p, n in (("q", 16), ("k", 8), ("v", 8))}
    config = fixtures.llama_config(bias=False, qkv_bias=True)
    folder = fixtures.write(tmp_path, config, fixtures.eagle1() | biases)
    assert open_head(folder, TARGET).report.config.layer.qkv_bias
    with pytest.raises(ValueError, match=r"says qkv_bias, but layers\.0\.self_attn\.q_proj\.bias is missing"):
        open_head(fixtures.write(tmp_path, config, fixtures.eagle1()), TARGET)


# -- whose embedding, whose LM head ---------------------------------------------------------


def test_other_width_than_the_target(tmp_path: Path) -> None:
    wide = fixtures.TargetShape(V, 24, 10, 128)
    tensors = fixtures.eagle3(target_hidden=24)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is missing"):
        open_head(_eagle3(tmp_path, tensors, target_hidden_size=24), wide)
    embedding = {"embed_tokens.weight": torch.randn(V, H)}
    head, report = fixtures.opened(_eagle3(tmp_path, tensors | embedding, target_hidden_size=24), wide)
    assert report.embedding == "its own" and torch.equal(head.embedding, embedding["embed_tokens.weight"])


def test_tied_embedding_written_over_the_lm_head(tmp_path: Path) -> None:
    tensors = fixtures.eagle3() | {"lm_head.weight": torch.randn(V, H)}
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \(40, 16\), expected \(12, 16\).*written over"):
        open_head(_eagle3(tmp_path, tensors, tie_word_embeddings=True), TARGET)


def test_tying_never_touches_the_lm_head(tmp_path: Path) -> None:
    tensors = fixtures.eagle3(vd=V) | {"embed_tokens.weight": torch.randn(V, H)}
    head, report = fixtures.opened(_eagle3(tmp_path, tensors, draft_vocab_size=V, tie_word_embeddings=True), TARGET)
    assert torch.equal(head.network.lm_head.weight, tensors["lm_head.weight"])
    assert "tie_word_embeddings is ignored" in str(report)


def test_lm_head_of_the_target_is_refused(tmp_path: Path) -> None:
    tensors = fixtures.eagle3(vd=V)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing.*borrows the target's"):
        open_head(_eagle3(tmp_path, tensors, draft_vocab_size=None), TARGET)


def test_stored_dtypes_survive(tmp_path: Path) -> None:
    tensors = {n: t.to(torch.bfloat16) if t.dim() == 2 else t for n, t in fixtures.eagle3().items()}
    head = open_head(_eagle3(tmp_path, tensors), TARGET)
    stored = stored_eagle(head)
    assert head.report.dtype == "bfloat16 and float32" and stored.dtype == torch.bfloat16
    assert stored.tensors["norm.weight"].dtype == torch.float32


# -- refused by name ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculators_model_type": "peagle"}, "P-EAGLE drafts all positions in one pass"),
        ({"architectures": ["PEagleDraftModel"], "speculators_model_type": "eagle3"}, "P-EAGLE"),
        ({"mask_token_id": 3}, "P-EAGLE"),
        ({"speculators_model_type": "dflash"}, "DFlash"),
        ({"speculators_model_type": "novel"}, "not known here"),
    ],
)
def test_other_speculators_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = fixtures.write(tmp_path, fixtures.speculators_config(**changes), fixtures.eagle3("layers.0"))
    with pytest.raises(ValueError, match=reason):
        open_head(folder, TARGET)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (_named("Eagle3DeepseekV2ForCausalLM"), "architecture 'Eagle3DeepseekV2ForCausalLM' is refused"),
        (_named("LlamaForCausalLMEagle", hot_vocab_size=12), "hot_vocab_size 12 is refused"),
        (fixtures.modelopt_config(parallel_draft_step=4), r"parallel_draft_step = 4 is refused"),
        (fixtures.modelopt_config(use_aux_hidden_state=False), r"use_aux_hidden_state = False is refused"),
        (_named("LlamaForCausalLMEagle3", draft_vocab_size=VD, logit_scale=0.5), "logit_scale"),
    ],
)
def test_other_networks_are_refused(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        open_head(fixtures.write(tmp_path, config, fixtures.eagle3("layers.0")), TARGET)


def test_hass_layernorms_are_refused(tmp_path: Path) -> None:
    config, tensors = _old_speculators()
    with pytest.raises(ValueError, match="HASS-style head with layernorms is refused"):
        open_head(fixtures.write(tmp_path, config | {"layernorms": True}, tensors), TARGET)


def test_two_heads_in_one_file(tmp_path: Path) -> None:
    twice = fixtures.eagle3() | {n: t for n, t in fixtures.eagle3("layers.0").items() if n.startswith("layers.0")}
    with pytest.raises(ValueError, match="both are the first layer"):
        open_head(_eagle3(tmp_path, twice), TARGET)


# -- written by their own libraries (interop/write_fixtures.py) ------------------------------

THEIRS = Path(__file__).parent / "fixtures"


def test_modelopts_own_export() -> None:
    """ModelOpt 0.47: layer outputs, and a yarn scaling that it injects on export."""
    head, report = fixtures.opened(THEIRS / "modelopt", TARGET)
    assert report.dialect == "modelopt" and report.config.features == DEFAULT_FEATURES
    assert torch.equal(head.draft_to_target, IDS)
    rope = report.config.layer.rope
    assert (rope.kind, rope.scaling["factor"], rope.original_max_positions) == ("yarn", 32.0, 2048)


def test_speculators_own_save() -> None:
    """speculators 0.9 with the norms of EAGLE 3.1."""
    head, report = fixtures.opened(THEIRS / "speculators", TARGET)
    assert report.dialect == "speculators" and report.config.features == DEFAULT_FEATURES
    assert report.config.fc_norm and report.config.norm_output and not report.config.norm_before_residual
    assert torch.equal(head.draft_to_target, IDS) and report.config.layer.rope.theta == 5000
