"""GGUF files become ordinary model folders, with the weights that transformers' own loader sees."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aquiline.checkpoints.eagle.gguf import is_gguf_head
from aquiline.models import gguf as gguf_target
from aquiline.models.gguf import tensor_names, write_target_from_gguf
from aquiline.models.gguf_header import read_gguf_header
from tests.models.tiny_gguf import CONTEXT, HEAD_DIM, write_tiny_gguf


def convert(path: Path) -> Path:
    folder = path.parent / "converted"
    folder.mkdir()
    write_target_from_gguf(path, folder)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_weights_and_logits_equal_transformers_loader(tmp_path: Path, architecture: str, untied: bool) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture, untied=untied)
    ours = AutoModelForCausalLM.from_pretrained(convert(tmp_path / "tiny.gguf"), dtype=torch.float32)
    # Their loader takes our config, since it knows no head width for the Qwen architectures.
    theirs = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file="tiny.gguf", config=ours.config, dtype=torch.float32
    )
    rounded = {name: value.to(torch.bfloat16).float() for name, value in theirs.state_dict().items()}
    assert rounded.keys() == ours.state_dict().keys()
    assert all(torch.equal(rounded[name], value) for name, value in ours.state_dict().items())
    theirs.load_state_dict(rounded)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits)


def test_config_states_what_the_file_says(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "llama")
    folder = convert(tmp_path / "tiny.gguf")
    config = config_of(folder)
    assert config["head_dim"] == HEAD_DIM
    assert config["max_position_embeddings"] == CONTEXT
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500_000.0
    assert config["tie_word_embeddings"] is True
    # End of text first, then end of turn: generation stops at either.
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_gemma3_has_a_window_and_two_rope_bases(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "gemma3")
    config = AutoModelForCausalLM.from_pretrained(convert(tmp_path / "tiny.gguf")).config
    assert config.sliding_window == 8
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0
    assert config.rope_parameters["full_attention"]["rope_theta"] == 500_000.0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_are_recovered(tmp_path: Path, factor: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=HEAD_DIM, hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    write_tiny_gguf(tmp_path / "tiny.gguf", rope_freqs=plain / scaled.numpy())
    assert config_of(convert(tmp_path / "tiny.gguf"))["rope_parameters"] == rope


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", rope_freqs=np.linspace(1, 8, HEAD_DIM // 2))
    with pytest.raises(ValueError, match="not Llama 3's"):
        convert(tmp_path / "tiny.gguf")


def test_tokenizer_keeps_ids_template_and_digit_splitter(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", chat_template="{{ messages[0]['content'] }}é")
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path / "tiny.gguf"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0, 2)
    assert tokenizer.model_max_length == CONTEXT
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "abé"
    # Two spaces before a digit are one token only where digits are split off first.
    assert tokenizer.tokenize("ab  7<|im_end|>") == ["ab", "ĠĠ", "7", "<|im_end|>"]
    text = "  x1 2\n é🙂"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    ("splitter", "expected"),
    [
        # Spaces before a digit, the digits, a word that no merge leads to.
        ("smollm", ["ĠĠ", "1", "2", "w", "h", "o", "l", "e"]),
        ("qwen2", ["Ġ", "Ġ", "1", "2", "w", "h", "o", "l", "e"]),
        ("llama-bpe", ["<|im_start|>", "Ġ", "Ġ", "12", "whole"]),
    ],
)
def test_splitters(tmp_path: Path, splitter: str, expected: list[str]) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", splitter=splitter)
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path / "tiny.gguf"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("  12whole").input_ids) == expected


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "gemma3")
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path / "tiny.gguf"))
    ids = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id
    assert ids == (2, 1, 3, 0)
    tokens = tokenizer("ab é").input_ids
    # A sentencepiece vocabulary begins each text with the begin token, a byte-level one does not.
    assert tokens[0] == 2
    assert tokenizer.convert_ids_to_tokens(tokens)[-3:] == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == "ab é"


def test_shards_hold_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    whole = AutoModelForCausalLM.from_pretrained(convert(tmp_path / "tiny.gguf")).state_dict()
    monkeypatch.setattr(gguf_target, "SHARD_BYTES", 50_000)
    (tmp_path / "sharded").mkdir()
    write_target_from_gguf(tmp_path / "tiny.gguf", tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    sharded = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded").state_dict()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_bad_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"tiny\.gguf is not a readable GGUF.*truncated"):
        convert(path)
    path.write_bytes(b"not a GGUF file, whatever its name says" * 10)
    with pytest.raises(ValueError, match=r"tiny\.gguf is not a readable GGUF"):
        write_target_from_gguf(path, tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"tiny\.gguf is not a readable GGUF"):
        write_target_from_gguf(path, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'; allowed: llama, qwen2, qwen3, gemma3"),
        ({"drop": "blk.1.ffn_up.weight"}, r"lacks the tensor blk\.1\.ffn_up\.weight \(1 "),
        ({"extra": "blk.0.ffn_gate_exps.weight"}, r"has the tensor blk\.0\.ffn_gate_exps\.weight, which a plain llama"),
    ],
)
def test_models_that_cannot_be_targets_are_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "tiny.gguf")


def _claims(change: bytes, count: int) -> bytes:
    """A header with one entry, an array of `count` elements of a kind."""
    key = b"tokenizer.ggml.tokens"
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    entry = len(key).to_bytes(8, "little") + key + (9).to_bytes(4, "little") + change + count.to_bytes(8, "little")
    return head + entry + b"\0" * 100


@pytest.mark.parametrize("kind", [0, 4, 8, 9, 12])
@pytest.mark.parametrize("count", [2**34, 2**63])
def test_arrays_that_claim_more_than_the_file_holds(kind: int, count: int, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(_claims(kind.to_bytes(4, "little"), count))
    with pytest.raises(ValueError, match=rf"small\.gguf.*tokens claims {count} elements"):
        read_gguf_header(path)
    assert not is_gguf_head(path)


def test_arrays_of_arrays_without_end(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    nest = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    path.write_bytes(_claims((9).to_bytes(4, "little"), 1)[:-100] + nest * 5000)
    with pytest.raises(ValueError, match=r"deep\.gguf.*kind 9"):
        read_gguf_header(path)


@pytest.mark.parametrize("count", [0, 2**32 - 1])
def test_a_block_count_that_the_tensors_do_not_have(count: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    header = read_gguf_header(path)
    false = dataclasses.replace(header, scalars={**header.scalars, "llama.block_count": count})
    with pytest.raises(ValueError, match=rf"block_count {count}.*fetch it again"):
        tensor_names(false)
