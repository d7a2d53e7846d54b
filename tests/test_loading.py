"""`load` and what it returns: arguments, damaged targets and prompts that are rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import aquiline
from aquiline.sampling import LossyRule
from tests import tiny
from tests.command_line import write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("loading") / "target")


@pytest.fixture(scope="module")
def loaded(target: Path) -> aquiline.Loaded:
    return aquiline.load(target, None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_rows": 1.5}, "max_rows is 1.5; allowed: an integer ≥ 1"),
        ({"max_rows": 0}, "max_rows is 0; allowed: ≥ 1"),
        ({"max_rows": "8"}, "max_rows is '8'"),
        ({"exact": "x"}, "exact is 'x'; allowed: True or False"),
        ({"packed": "no"}, "packed is 'no'; allowed: True or False"),
        ({"packed": None}, "packed is None"),
        ({"compile": 1}, "compile is 1; allowed: True or False"),
        ({"compile": True}, "compile is True.*no effect.*packed=False"),
        ({"adaptive": 1}, "adaptive is 1"),
        ({"shared_lookup": None}, "shared_lookup is None"),
        ({"shared_lookup": True}, "shared_lookup is True.*draft is None.*drop"),
        ({"shared_lookup": True, "draft": "lookahead"}, "Lookahead.*use it alone"),
        ({"draft": ""}, "draft is ''; allowed: a name"),
        ({"draft": 5}, "draft is an? int; allowed"),
        ({"draft": aquiline.PromptLookup}, "draft is a type"),
        ({"draft": tiny.hf_model("llama", torch.float32)}, "draft is a LlamaForCausalLM.*SmallModel"),
        ({"draft": "prompt-lookup", "tree": ""}, "tree is ''"),
        ({"target": ""}, "target is ''"),
        ({"tokenizer": "x"}, "tokenizer is 'x'"),
        ({"lossy": "typical"}, "lossy is 'typical'; allowed: a LossyRule"),
        ({"lossy": LossyRule}, "lossy is"),
        ({"dtype": [1]}, r"dtype is \[1\]; allowed"),
        ({"dtype": torch.int8}, "int8.*allowed"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"device": "nowhere"}, "device is 'nowhere'; allowed"),
        ({"device": "cuda:99"}, "device is 'cuda:99'.*allowed"),
    ],
)
def test_rejected_arguments(target: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        aquiline.load(**({"target": target, "draft": None} | settings))


def test_a_model_that_was_passed_in_stays_what_and_where_it_is() -> None:
    model = tiny.hf_model("llama", torch.float32)
    assert aquiline.load(model, None, dtype="float32").target.dtype == torch.float32
    for settings, words in (({"dtype": "float16"}, "dtype is float16.*float32"), ({"device": "cuda"}, "cuda.*cpu")):
        with pytest.raises(ValueError, match=words):
            aquiline.load(model, None, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", [97, 9999, -1, [1, 97]])
def test_end_tokens_outside_the_vocabulary(end: Any) -> None:
    model = tiny.hf_model.__wrapped__("llama", torch.float32)
    model.generation_config.eos_token_id = end
    with pytest.raises(ValueError, match=r"eos_token_id.*allowed: 0 … 96"):
        aquiline.load(model, None)


def test_the_command_lines_none_means_the_same_in_python(target: Path) -> None:
    loaded = aquiline.load(target, "none")
    assert (loaded.drafter, loaded.draft_name) == (None, "plain")
    with pytest.raises(ValueError, match=r"tree.*draft=None"):
        aquiline.load(target, "none", tree=aquiline.Chain(3))


def test_rejected_arguments_of_generate(loaded: aquiline.Loaded) -> None:
    for arguments, settings, words in (
        (("x",), {"raw": "no"}, "raw is 'no'; allowed: True or False"),
        (("x", 5), {}, "params is 5; allowed: SamplingParams"),
        (("x",), {"max_tokens": 5}, "'max_tokens'; allowed: max_new_tokens"),
        (([b"abc"],), {}, "not bytes"),
    ):
        with pytest.raises(TypeError, match=words):
            loaded.generate(*arguments, **settings)


def test_of_several_prompts_an_error_names_the_one(loaded: aquiline.Loaded) -> None:
    for prompts, error, words in (
        (["a", "", "b"], ValueError, "prompt 2 of 3: the prompt is empty"),
        (["a", [999]], ValueError, "prompt 2 of 2: the prompt has token id 999; allowed: 0 … 257"),
        ([[1.5], "a"], TypeError, "prompt 1 of 2: 1.5 in the prompt is neither"),
        (["a", "word " * 999], ValueError, "prompt 2 of 2: a prompt of .* leaves no room"),
        ([[999]], ValueError, "^the prompt has"),
    ):
        with pytest.raises(error, match=words):
            loaded.stream(prompts)  # at the call, before any work
    with pytest.raises(ValueError, match=r"^min_new_tokens is 9"):
        loaded.stream(["a", "b"], min_new_tokens=9, max_new_tokens=3)


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
        (_generation("{"), "generation_config.json is not"),
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


# -- a small model's tokens --------------------------------------------------------------------


def _tokens(folder: Path, change: Callable[[dict[str, int]], dict[str, int]]) -> None:
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text())
    document["model"]["vocab"] = change(document["model"]["vocab"])
    file.write_text(json.dumps(document))


def _rotated(vocabulary: dict[str, int]) -> dict[str, int]:
    return dict(zip(vocabulary, [*list(vocabulary.values())[1:], 0], strict=True))


def test_a_small_model_with_another_tokenizer_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target, draft = write_target(tmp_path / "target"), write_target(tmp_path / "draft")
    loaded = aquiline.load(target, draft, dtype="float32")
    found, plain = loaded.generate([5, 6], max_new_tokens=9), loaded.plain().generate([5, 6], max_new_tokens=9)
    assert found.stats.accepted > 0 and found.token_ids == plain.token_ids
    _tokens(draft, lambda vocabulary: {("@@@@" if i == 9 else token): i for token, i in vocabulary.items()})
    aquiline.load(target, draft, dtype="float32")
    assert "1 tokens of" in caplog.text
    _tokens(draft, _rotated)
    with pytest.raises(ValueError, match=r"draft has another tokenizer.*distil"):
        aquiline.load(target, draft, dtype="float32")


@pytest.mark.parametrize("more", [-2, 3])
def test_a_small_model_with_a_padded_vocabulary_drafts(more: int, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    draft = write_target(
        tmp_path / "draft", vocab_size=json.loads((target / "config.json").read_text())["vocab_size"] + more
    )
    loaded = aquiline.load(target, draft, dtype="float32")
    assert loaded.generate([5, 6, 256], max_new_tokens=9).token_ids == (
        loaded.plain().generate([5, 6, 256], max_new_tokens=9).token_ids
    )
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json to compare"):
        aquiline.load(target, draft, dtype="float32")


# -- texts to draft from -------------------------------------------------------------------------


def test_a_prediction_is_drafted_from_and_changes_no_output(loaded: aquiline.Loaded) -> None:
    plain = loaded.generate([3, 14, 15], max_new_tokens=40, ignore_eos=True)
    wrong = [*plain.token_ids[:20], 1, 2, 1, *plain.token_ids[20:]]
    for prediction in (plain.token_ids, wrong):
        found = loaded.generate([3, 14, 15], prediction=prediction, max_new_tokens=40, ignore_eos=True)
        assert found.token_ids == plain.token_ids
        assert found.stats.steps <= 6 and found.stats.sources["prediction"] >= 34
    assert plain.stats.sources == {"target": 40}
    batch = loaded.generate([[3, 14, 15], [7, 9]], prediction=[1, 2], max_new_tokens=9, ignore_eos=True)
    assert batch[0].token_ids == plain.token_ids[:9]


@pytest.mark.parametrize(
    ("prediction", "words"), [(5, "prediction is a int.*token ids"), (b"x", "bytes"), ([1, "x"], "'x'.*integers")]
)
def test_rejected_predictions(loaded: aquiline.Loaded, prediction: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        loaded.generate([3], prediction=prediction)


def test_prompts_run_again_draft_from_their_earlier_outputs(target: Path) -> None:
    model = aquiline.load(target, "prompt-lookup", shared_lookup=True, adaptive=False)
    prompts, settings = (
        [[3, 14, 15], [9, 26, 5]],
        {"max_new_tokens": 80, "ignore_eos": True, "temperature": 1.0, "seed": 3},
    )
    first = model.generate(prompts, **settings)
    again = model.generate(prompts, **settings)
    plain = model.plain().generate(prompts, **settings)
    assert [out.token_ids for out in again] == [out.token_ids for out in first] == [out.token_ids for out in plain]
    assert all(out.stats.sources["shared"] > 60 for out in again)
    assert sum(out.stats.steps for out in again) < sum(out.stats.steps for out in first) / 2.5


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integer_weights_decode_losslessly(target: Path, dtype: str) -> None:
    drafted = aquiline.load(target, "prompt-lookup", dtype=dtype, exact=True, adaptive=False)
    assert drafted.target.describe().startswith(f"native {dtype}")  # type: ignore[attr-defined]
    prompts = [[5, 6, 7, 5, 6], [9, 8, 9, 8]]
    drafts = drafted.generate(prompts, max_new_tokens=24, temperature=0)
    plain = drafted.plain().generate(prompts, max_new_tokens=24, temperature=0)
    assert [output.token_ids for output in drafts] == [output.token_ids for output in plain]


def test_integer_weights_need_the_kernels(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"int8.*packed=True"):
        aquiline.load(target, None, dtype="int8", packed=False)
    monkeypatch.setattr("aquiline.targets.native.find_library", lambda: (None, "no compiler"))
    with pytest.raises(ValueError, match=r"int4.*native kernels"):
        aquiline.load(target, None, dtype="int4")
