"""EAGLE-3 heads as GGUF files keep their bits, and broken files are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aquiline.checkpoints.eagle.gguf import interleaved
from aquiline.checkpoints.export.layouts import export_head
from aquiline.checkpoints.open import open_head
from aquiline.models.gguf import rotary_halves
from tests.checkpoints import head_fixtures as fixtures
from tests.checkpoints.head_fixtures import IDS, TARGET, VD, H, V, assert_same_bits, eagle3_head

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gguf_round_trip(dtype: torch.dtype, tmp_path: Path, target_gguf: Path) -> None:
    extra = {"embed_tokens.weight": torch.randn(V, H)}
    tensors = {n: t.to(dtype) if t.dim() == 2 else t for n, t in (fixtures.eagle3() | extra).items()}
    source = fixtures.write(
        tmp_path / "head",
        fixtures.llama_config(draft_vocab_size=VD, rope_theta=5000.0, rms_norm_eps=1e-5, target_hidden_size=H)
        | {"aquiline_gamma": 1.15, "aquiline_window": 96},
        tensors,
    )
    report = export_head(source, "gguf", tmp_path / "out", TARGET, target_gguf=target_gguf)
    assert report.files == ("head.gguf", "README.md") and "--spec-type draft-eagle3" in report.snippet
    assert_same_bits(source, tmp_path / "out" / "head.gguf")
    export_head(tmp_path / "out" / "head.gguf", "safeailab", tmp_path / "back", TARGET)
    assert_same_bits(source, tmp_path / "back")


def test_gguf_as_llama_cpp_reads_it(tmp_path: Path, target_gguf: Path) -> None:
    """Keys, names and orders from llama.cpp's converter and loader."""
    source = eagle3_head(tmp_path / "head", norm_before_residual=True)
    export_head(source, "gguf", tmp_path / "head.gguf", TARGET, target_gguf=target_gguf)
    reader = gguf.GGUFReader(tmp_path / "head.gguf")
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert values["general.architecture"] == "eagle3" and values["eagle3.block_count"] == 1
    assert values["eagle3.target_layers"] == [2, 5, 7] and values["eagle3.target_hidden_size"] == H
    assert values["eagle3.norm_before_residual"] is True and values["eagle3.rope.freq_base"] == 5000.0
    assert values["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(V)] and values["tokenizer.ggml.eos_token_id"] == 2
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == {
        "fc.weight",
        "output_norm.weight",
        "output.weight",
        "d2t",
        *(f"blk.0.{n}.weight" for n in ("attn_norm", "attn_norm_2", "ffn_norm", "attn_q", "attn_k", "attn_v")),
        *(f"blk.0.{n}.weight" for n in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")),
    }
    assert np.array_equal(tensors["d2t"].data, IDS.numpy())  # absolute
    assert tensors["blk.0.attn_norm_2.weight"].tensor_type.name == "F32"
    query = torch.from_numpy(np.array(tensors["blk.0.attn_q.weight"].data).view(np.int16)).view(torch.bfloat16)
    rows = load_file(source / "model.safetensors")["midlayer.self_attn.q_proj.weight"]
    assert torch.equal(query[:4], rows[[0, 2, 1, 3]])  # heads of 4 rows: halves become pairs


def test_interleaving_is_undone() -> None:
    weight = torch.randn(24, 5)
    assert torch.equal(rotary_halves(interleaved(weight, 3), 3), weight)
    assert torch.equal(interleaved(torch.arange(6)[:, None], 1).flatten(), torch.tensor([0, 3, 1, 4, 2, 5]))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("eagle3.attention.head_count", 0, r"num_attention_heads = 0, expected a positive number"),
        ("eagle3.block_count", 10**9, r"num_hidden_layers = 10+, expected a number up to 128"),
        ("eagle3.embedding_length", 12, r"give heads of width|has shape"),
        ("eagle3.rope.freq_base", "no number", r"rope_theta = 'no number', expected a number > 0"),
        ("aquiline.rope_parameters", "{", r"aquiline\.rope_parameters is not valid JSON"),
        ("aquiline.rope_parameters", "[1]", r"aquiline\.rope_parameters is \[1\], expected an object"),
    ],
)
def test_gguf_with_broken_metadata(
    key: str, value: Any, message: str, tmp_path: Path, target_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_head(eagle3_head(tmp_path / "head"), "gguf", tmp_path / "head.gguf", TARGET, target_gguf=target_gguf)
    contents = gguf.ReaderField.contents

    def damaged(field: Any, *arguments: Any) -> Any:
        if key == "eagle3.rope.freq_base" and field.name == "aquiline.rope_parameters":
            return "{}"
        return value if field.name == key else contents(field, *arguments)

    monkeypatch.setattr(gguf.ReaderField, "contents", damaged)
    with pytest.raises(ValueError, match=message) as caught:
        open_head(tmp_path / "head.gguf", TARGET)
    assert "head.gguf" in str(caught.value)


def test_gguf_llama3_scaling(tmp_path: Path, target_gguf: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    source = eagle3_head(tmp_path / "head", rope_parameters=scaling)
    export_head(source, "gguf", tmp_path / "head.gguf", TARGET, target_gguf=target_gguf)
    factors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "head.gguf").tensors}["rope_freqs.weight"]
    assert factors[0] == 1.0 and factors[1] == 8.0  # wavelengths 6 and 444 against 64
    assert_same_bits(source, tmp_path / "head.gguf")


def test_gguf_needs_the_targets_file(tmp_path: Path, target_gguf: Path) -> None:
    source = eagle3_head(tmp_path / "head")
    with pytest.raises(ValueError, match="give the target's own GGUF file"):
        export_head(source, "gguf", tmp_path / "out", TARGET)
    with pytest.raises(ValueError, match=r"config\.json is not a readable GGUF file.*own GGUF file"):
        export_head(source, "gguf", tmp_path / "out", TARGET, target_gguf=source / "config.json")
    assert not list((tmp_path / "out").glob("*"))
    with pytest.raises(ValueError, match=r"architecture 'llama', expected 'eagle3'"):
        open_head(target_gguf, TARGET)
    export_head(source, "gguf", tmp_path / "whole.gguf", TARGET, target_gguf=target_gguf)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((tmp_path / "whole.gguf").read_bytes()[:4000])
    with pytest.raises(ValueError, match=r"cut\.gguf is not a readable GGUF file.*fetch it again"):
        open_head(cut, TARGET)
