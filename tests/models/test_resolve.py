"""Names become folders, or errors with a remedy."""

import json
import logging
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from aquiline.models.resolve import resolve_target, target_fingerprint, weight_files
from tests.models.tiny_gguf import tiny_folder, write_tiny_gguf


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    tiny_folder(folder)
    return folder


@pytest.fixture
def folder(stock: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(stock, tmp_path / "target"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cache_in_hub(hub: Path, folder: Path) -> Path:
    repository = hub / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(folder, repository / "snapshots" / ("0" * 40)))


def test_folder_is_taken_as_it_is(folder: Path) -> None:
    assert resolve_target(folder) == folder
    assert resolve_target(str(folder)) == folder


@pytest.mark.real
def test_alias(smollm2_folder: Path) -> None:
    assert resolve_target("smollm2") == smollm2_folder
    assert target_fingerprint(smollm2_folder) == target_fingerprint(resolve_target("smollm2"))


def test_gguf_file_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aquiline")
    monkeypatch.setenv("AQUILINE_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "a.gguf")
    folder = resolve_target(tmp_path / "a.gguf")
    assert caplog.messages == ["hashing a.gguf", "dequantising a.gguf"]
    assert resolve_target(str(tmp_path / "a.gguf")) == folder
    assert len(caplog.messages) == 2
    # The key is the content: another name is the same target, other content is another one.
    (tmp_path / "a.gguf").rename(tmp_path / "b.gguf")
    assert resolve_target(tmp_path / "b.gguf") == folder
    write_tiny_gguf(tmp_path / "b.gguf", untied=True)
    assert resolve_target(tmp_path / "b.gguf") != folder


def test_gguf_of_another_architecture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUILINE_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "a.gguf", "mamba")
    with pytest.raises(ValueError, match=r"'mamba'; allowed: llama, qwen2, qwen3, gemma3"):
        resolve_target(tmp_path / "a.gguf")


def test_hub_id_from_a_filled_cache_without_network(hub: Path, folder: Path) -> None:
    snapshot = cache_in_hub(hub, folder)
    assert resolve_target("someone/tiny") == snapshot


def test_hub_id_that_is_not_to_be_had(hub: Path) -> None:
    message = r"could not get 'someone/tiny': .*check the spelling and the network.*alias \(smollm2"
    with pytest.raises(RuntimeError, match=message):
        resolve_target("someone/tiny")


def test_half_cached_hub_model_is_not_taken_for_whole(hub: Path, folder: Path) -> None:
    snapshot = cache_in_hub(hub, folder)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises((RuntimeError, ValueError), match=r"could not get|lacks model\.safetensors"):
        resolve_target("someone/tiny")


@pytest.mark.parametrize("name", ["smolm2", "/nowhere/model", "a/b/c", "someone/model.gguf", "../x"])
def test_unknown_name_lists_what_is_allowed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"alias \(smollm2, gemma3-270m\), a model folder, a GGUF file, or a hub id"):
        resolve_target(name)


def test_broken_folders_say_what_is_broken(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (content[:-10], content + b"more", content[:20], b"", b"\xff" * 100):
        weights.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
            resolve_target(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        resolve_target(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"pickled \.bin files only; convert"):
        resolve_target(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        resolve_target(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_target(folder)
    (folder / "x.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"give the file .*x\.gguf"):
        resolve_target(folder)


def test_draft_head_is_not_a_target(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(ValueError, match="draft head"):
        resolve_target(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00002\.safetensors"):
        weight_files(folder)


def test_fingerprint_survives_saving_again(stock: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(stock)
    model.save_pretrained(tmp_path / "again", max_shard_size="2KB")
    AutoTokenizer.from_pretrained(stock).save_pretrained(tmp_path / "again")
    assert len(weight_files(tmp_path / "again")) > 1
    assert target_fingerprint(tmp_path / "again") == target_fingerprint(stock)


def test_fingerprint_ignores_a_saved_copy_of_the_tied_head(stock: Path, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    assert target_fingerprint(folder) == target_fingerprint(stock)


@pytest.mark.parametrize("change", ["fine-tuned layer", "dtype", "config", "vocabulary", "added token"])
def test_fingerprint_tells_targets_apart(stock: Path, folder: Path, change: str) -> None:
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    if change == "fine-tuned layer":
        name = "model.layers.1.mlp.down_proj.weight"
        weights[name] = weights[name] + torch.full_like(weights[name], 0.01)
    elif change == "dtype":
        weights = {name: value.float() for name, value in weights.items()}
    elif change == "config":
        config["num_attention_heads"] = 4
    elif change == "vocabulary":
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    else:
        tokenizer["added_tokens"].append({"id": 31, "content": "<new>"})
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert target_fingerprint(folder) != target_fingerprint(stock)
