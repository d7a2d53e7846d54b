"""Exports hold the same bits, say what engines need, and are refused where an engine would lie."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.checkpoints.export.layouts import FORMATS, export_head
from aquiline.checkpoints.export.openvino import COMMAND_VARIABLE
from aquiline.checkpoints.open import open_head, stored_eagle
from tests import tiny
from tests.checkpoints import head_fixtures as fixtures
from tests.checkpoints.head_fixtures import IDS, TARGET, VD, H, V, assert_same_bits, eagle3_head
from tests.full_disk import no_file_above

pytest.importorskip("gguf")
TEXT_FORMATS = ("safeailab", "speculators", "vllm", "sglang")


def _eagle1(folder: Path, *, bias: bool = False) -> Path:
    return fixtures.write(folder, fixtures.llama_config(bias=bias), fixtures.eagle1(bias=bias, embedding=False))


@pytest.mark.parametrize("to", TEXT_FORMATS)
def test_round_trip_eagle3(to: str, tmp_path: Path) -> None:
    source = eagle3_head(tmp_path / "head")
    report = export_head(source, to, tmp_path / "out", TARGET, target_name="some/target")
    assert_same_bits(source, tmp_path / "out")
    export_head(tmp_path / "out", "safeailab", tmp_path / "back", TARGET)
    assert_same_bits(source, tmp_path / "back")
    assert report.files == ("config.json", "model.safetensors", "README.md")
    assert report.snippet in (tmp_path / "out" / "README.md").read_text()


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = eagle3_head(tmp_path / "head")
    with no_file_above(5000), pytest.raises(OSError, match="File too large") as caught:
        export_head(source, "vllm", tmp_path / "out", TARGET)
    assert caught.value.filename == str(tmp_path / "out") and list((tmp_path / "out").iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5000))
    with pytest.raises(ValueError, match=r"out needs up to .*larger disk"):
        export_head(source, "vllm", tmp_path / "out", TARGET)


@pytest.mark.parametrize("to", ["safeailab", "vllm", "sglang"])
def test_round_trip_eagle1(to: str, tmp_path: Path) -> None:
    source = _eagle1(tmp_path / "head")
    export_head(source, to, tmp_path / "out", TARGET)
    if to == "sglang":
        zeros = load_file(tmp_path / "out" / "model.safetensors").pop("fc.bias")
        assert not zeros.any()
    assert_same_bits(source, tmp_path / "out")


@pytest.mark.parametrize("to", ["safeailab", "sglang"])
def test_round_trip_of_an_fc_bias(to: str, tmp_path: Path) -> None:
    source = _eagle1(tmp_path / "head", bias=True)
    export_head(source, to, tmp_path / "out", TARGET)
    assert_same_bits(source, tmp_path / "out")


@pytest.mark.parametrize("to", TEXT_FORMATS)
def test_nothing_is_written_that_was_not_there(to: str, tmp_path: Path) -> None:
    source = eagle3_head(tmp_path / "head")
    export_head(source, to, tmp_path / "out", TARGET)
    given, written = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert {name.replace("layers.0.", "midlayer.") for name in written} == set(given)
    for name, tensor in written.items():
        assert torch.equal(tensor, given[name.replace("layers.0.", "midlayer.")])


@pytest.mark.parametrize("to", TEXT_FORMATS)
def test_what_engines_misread_is_always_said(to: str, tmp_path: Path) -> None:
    export_head(eagle3_head(tmp_path / "head"), to, tmp_path / "out", TARGET)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    inner = config.get("transformer_layer_config", config)
    assert config["bias"] is False and inner["attention_bias"] is False
    assert inner["rope_theta"] == inner["rope_parameters"]["rope_theta"] == 5000.0
    assert inner["tie_word_embeddings"] is False and config["draft_vocab_size"] == VD
    if to == "speculators":
        assert config["norm_before_residual"] is False and config["norm_output"] is False
        assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
        assert config["speculators_config"]["verifier"]["name_or_path"] == "TARGET"


@pytest.mark.parametrize(
    ("to", "kind", "words"),
    [
        ("vllm", "eagle3", ["vllm serve some/target --speculative-config", '"method": "eagle3"', "OUT"]),
        ("vllm", "eagle", ['"method": "eagle"', '"num_speculative_tokens": 3']),
        ("sglang", "eagle3", ["--speculative-algorithm EAGLE3", "--speculative-num-draft-tokens 4", "OUT"]),
        ("sglang", "eagle", ["--speculative-algorithm EAGLE "]),
        ("speculators", "eagle3", ["vllm serve ", "OUT"]),
        ("safeailab", "eagle", ["use_eagle3=False"]),
    ],
)
def test_snippets(to: str, kind: str, words: list[str], tmp_path: Path) -> None:
    source = eagle3_head(tmp_path / "head") if kind == "eagle3" else _eagle1(tmp_path / "head")
    report = export_head(source, to, tmp_path / "OUT", TARGET, target_name="some/target")
    assert all(word in report.snippet for word in words) and report.snippet in str(report)
    if to == "vllm":
        settings = json.loads(shlex.split(report.snippet)[-1])
        assert settings["model"] == str(tmp_path / "OUT")


@pytest.mark.parametrize(
    ("features", "nested"),
    [([2, 5, 7], None), ([2, 4, 7], [1, 3, 6]), ([3, 5, 7], [3, 5, 7]), ([4, 8, 10], [4, 8, 10])],
)
def test_sglang_layer_ids(features: list[int], nested: list[int] | None, tmp_path: Path) -> None:
    source = eagle3_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=features)
    export_head(source, "sglang", tmp_path / "out", TARGET)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids") == nested
    assert_same_bits(source, tmp_path / "out")


_FC_NORMS = {f"fc_norm.{i}.weight": torch.ones(H) for i in range(3)}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("speculators", {"eagle": True}, "knows EAGLE-3 heads only"),
    ("gguf", {"eagle": True}, "knows EAGLE-3 heads only"),
    ("openvino", {"eagle": True}, "knows EAGLE-3 heads only"),
    ("vllm", {"eagle": True, "bias": True}, "ignores the bias of fc"),
    ("safeailab", {"fc_norm": True, "tensors": _FC_NORMS}, "ignores fc_norm"),
    ("gguf", {"fc_norm": True, "norm_output": True, "tensors": _FC_NORMS}, "fc_norm and norm_output"),
    ("openvino", {"norm_output": True}, "ignores norm_output"),
    ("sglang", {"norm_before_residual": True}, "ignores norm_before_residual"),
    ("safeailab", {"eagle_aux_hidden_state_layer_ids": [1, 5, 7]}, r"fixed layers, this head reads \(1, 5, 7\)"),
    ("sglang", {"eagle_aux_hidden_state_layer_ids": [1, 5, 7]}, "starts with 1"),
    ("gguf", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0}}, "'yarn' rope scaling"),
    ("safeailab", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}, "'linear' rope"),
    ("openvino", {"eagle_aux_hidden_state_layer_ids": [0, 5, 7]}, r"outputs of layers in their order, .* \(0, 5, 7\)"),
    ("openvino", {"eagle_aux_hidden_state_layer_ids": [5, 2, 7]}, r"outputs of layers in their order, .* \(5, 2, 7\)"),
    ("openvino", {"tensors": {"embed_tokens.weight": torch.ones(V, H)}}, "always takes the target's embedding"),
    ("vllm", {"hidden_act": "gelu_pytorch_tanh"}, "runs silu only"),
    ("gguf", {"tensors": {"fc.weight": torch.ones(H, 3 * H, dtype=torch.float64)}}, "runs float32 at most"),
]


@pytest.mark.parametrize(("to", "changes", "reason"), REFUSED)
def test_refused_with_the_reason(to: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    changes = dict(changes)
    if changes.pop("eagle", False):
        source = _eagle1(tmp_path / "head", bias=changes.get("bias", False))
    else:
        source = eagle3_head(tmp_path / "head", **changes)
    with pytest.raises(ValueError, match=reason):
        export_head(source, to, tmp_path / "out", TARGET)
    assert not (tmp_path / "out").exists()


def test_a_refusal_names_formats_that_can(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Formats that can hold it: safeailab, vllm, sglang$"):
        export_head(_eagle1(tmp_path / "head"), "speculators", tmp_path / "out", TARGET)
    with pytest.raises(ValueError, match="allowed: " + ", ".join(FORMATS)):
        export_head(tmp_path / "head", "onnx", tmp_path / "out", TARGET)


def test_norms_of_3_1_reach_the_engines_that_have_them(tmp_path: Path) -> None:
    source = eagle3_head(tmp_path / "head", fc_norm=True, norm_output=True, tensors=_FC_NORMS)
    for to in ("speculators", "vllm", "sglang"):
        export_head(source, to, tmp_path / to, TARGET)
        config = json.loads((tmp_path / to / "config.json").read_text())
        assert config["fc_norm"] is True and config["norm_output"] is True
        assert_same_bits(source, tmp_path / to)


def test_own_embedding_goes_along(tmp_path: Path) -> None:
    source = eagle3_head(tmp_path / "head", tensors={"embed_tokens.weight": torch.randn(V, H, dtype=torch.bfloat16)})
    for to in TEXT_FORMATS:
        export_head(source, to, tmp_path / to, TARGET)
        assert_same_bits(source, tmp_path / to)
    # Only with this key does the reference take the embedding out of the checkpoint.
    assert json.loads((tmp_path / "safeailab" / "config.json").read_text())["target_hidden_size"] == H


def test_what_other_engines_do_not_read_goes_along(tmp_path: Path) -> None:
    head = tiny.head("eagle3", dtype=torch.float32)
    shape = fixtures.TargetShape(tiny.VOCAB, 48, 7, 256)
    head.target_fingerprint, head.gamma, head.window = "a" * 64, 1.15, 96
    write_head(tmp_path / "head", head, torch.float32)
    export_head(tmp_path / "head", "vllm", tmp_path / "out", shape)
    opened = open_head(tmp_path / "out", shape)
    stored, report = stored_eagle(opened), opened.report
    assert torch.equal(stored.tensors["fc.weight"], head.network.fc.weight) and report.fingerprint == "a" * 64
    assert stored.gamma == report.gamma == 1.15 and stored.window == report.window == 96


# -- where it is written ---------------------------------------------------------------------


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("to", [*TEXT_FORMATS, "gguf"])
@pytest.mark.parametrize(
    "there", ["the head", "an export to another engine", "a project", "shards", "a file", "a link"]
)
def test_other_files_are_not_written_over(to: str, there: str, tmp_path: Path, target_gguf: Path) -> None:
    source, output = eagle3_head(tmp_path / "head"), tmp_path / "out"
    if there == "the head":
        output = source
    elif there == "an export to another engine":
        export_head(source, "sglang" if to != "sglang" else "vllm", output, TARGET)
    elif there == "a file":
        output.write_text("mine")
    elif there == "a link":
        output.symlink_to(tmp_path / "nowhere")
    else:
        output.mkdir()
        (output / ("README.md" if there == "a project" else "model-00001-of-00002.safetensors")).write_text("mine")
    before = _contents(tmp_path)
    with pytest.raises(ValueError, match=r"(overwrit|is a file).*; name ") as caught:
        export_head(source, to, output, TARGET, target_gguf=target_gguf)
    assert str(output) in str(caught.value)
    assert _contents(tmp_path) == before


def test_an_earlier_export_is_written_over(tmp_path: Path) -> None:
    source = eagle3_head(tmp_path / "head")
    for output in (tmp_path / "out", tmp_path / "out", source / "inside"):
        export_head(source, "vllm", output, TARGET)
        assert_same_bits(source, output)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out cannot be made: .*file is a file; name another output"):
        export_head(source, "vllm", tmp_path / "file" / "out", TARGET)


def test_a_gguf_file_that_is_no_head_is_not_written_over(tmp_path: Path, target_gguf: Path) -> None:
    source, before = eagle3_head(tmp_path / "head"), target_gguf.read_bytes()
    for _ in range(2):
        export_head(source, "gguf", tmp_path / "head.gguf", TARGET, target_gguf=target_gguf)
    with pytest.raises(ValueError, match=r"target\.gguf .*not a draft head.*name another file"):
        export_head(source, "gguf", target_gguf, TARGET, target_gguf=target_gguf)
    assert target_gguf.read_bytes() == before
    with pytest.raises(ValueError, match="is the head itself"):
        export_head(tmp_path / "head.gguf", "gguf", tmp_path / "head.gguf", TARGET, target_gguf=target_gguf)
    other = TARGET.__class__(V + 1, H, 10, 128)
    with pytest.raises(ValueError, match=r"target\.gguf has a tokenizer of 40 tokens, the head's target has 41"):
        larger = eagle3_head(tmp_path / "larger", vocab_size=V + 1, tensors={"t2d": _t2d(V + 1)})
        export_head(larger, "gguf", tmp_path / "larger.gguf", other, target_gguf=target_gguf)
    assert not list(tmp_path.glob("larger.gguf*"))


def _t2d(size: int) -> torch.Tensor:
    member = torch.zeros(size, dtype=torch.bool)
    member[IDS] = True
    return member


def test_a_pickle_of_parameters_that_share_memory(tmp_path: Path, target_gguf: Path) -> None:
    """safetensors refuses shared memory, and numpy whatever asks for gradients."""
    tensors: dict[str, Any] = fixtures.eagle3()
    gate, up = "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"
    tensors = {n: torch.nn.Parameter(t) if t.is_floating_point() else t for n, t in tensors.items()}
    tensors[gate] = tensors[up]
    config = fixtures.llama_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VD, rope_theta=5000.0)
    source = fixtures.write(tmp_path / "head", config, tensors, pickled=True)
    for to in (*TEXT_FORMATS, "gguf"):
        export_head(source, to, tmp_path / to, TARGET, target_gguf=target_gguf)
        assert_same_bits(source, tmp_path / "gguf" / "head.gguf" if to == "gguf" else tmp_path / to)


# -- OpenVINO -------------------------------------------------------------------------------


def test_openvino_runs_its_own_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for optimum-cli keeps what it was given."""
    script = tmp_path / "optimum-cli"
    script.write_text(
        '#!/bin/sh\nfor last; do :; done\nmkdir -p "$last"\necho "$@" > "$last/said"\n'
        'cp "$4/config.json" "$last/given.json"\n'
        'echo \'<rt_info><eagle3_mode value="True" /></rt_info>\' > "$last/openvino_model.xml"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv(COMMAND_VARIABLE, str(script))
    report = export_head(
        eagle3_head(tmp_path / "head"), "openvino", tmp_path / "out", TARGET, target_name="some/target"
    )
    said = (tmp_path / "out" / "said").read_text()
    assert re.match(r"export openvino -m \S+ --task text-generation-with-past --trust-remote-code", said)
    assert "--weight-format fp32" in said  # float16 would lose bits of bfloat16
    given = json.loads((tmp_path / "out" / "given.json").read_text())
    assert given["architectures"] == ["LlamaForCausalLMEagle3"] and "draft_model" in report.snippet
    # OpenVINO GenAI names layers by their outputs: what enters layers 2, 5, 7 are the outputs of 1, 4, 6.
    assert '<hidden_layers_list value="1 4 6" />' in (tmp_path / "out" / "openvino_model.xml").read_text()
    assert {*report.files} == {path.name for path in (tmp_path / "out").iterdir()}
    script.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match=r"optimum-cli failed \(3\): broken"):
        export_head(eagle3_head(tmp_path / "head"), "openvino", tmp_path / "out2", TARGET)
    assert not list((tmp_path / "out2").iterdir())
    script.write_text('#!/bin/sh\nfor last; do :; done\nmkdir -p "$last"\necho x > "$last/openvino_model.xml"\n')
    with pytest.raises(RuntimeError, match="optimum-cli wrote a graph without <eagle3_mode"):
        export_head(eagle3_head(tmp_path / "head"), "openvino", tmp_path / "out2", TARGET)
    monkeypatch.setenv(COMMAND_VARIABLE, str(tmp_path / "head" / "config.json"))
    with pytest.raises(ValueError, match=r"AQUILINE_OPTIMUM_CLI is '.*config\.json', no program that runs"):
        export_head(eagle3_head(tmp_path / "head"), "openvino", tmp_path / "out3", TARGET)
    monkeypatch.delenv(COMMAND_VARIABLE)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="optimum-cli is not installed"):
        export_head(eagle3_head(tmp_path / "head"), "openvino", tmp_path / "out3", TARGET)
