"""Exports draft heads to serving engines: losslessly, or not at all, with the reason.

Engines silently ignore most of what they cannot do, and the user sees an acceptance of zero.
Therefore each engine has a list of what it runs (`ENGINES`), and heads that need more are rejected.
Tensors are copied bit by bit; only their names and the configuration change.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aquiline.checkpoints.eagle.config_kinds import NORM_FLAGS
from aquiline.checkpoints.eagle.gguf import is_gguf_head, write_gguf_head
from aquiline.checkpoints.eagle.safeailab import file_tensors, layer_keys, llama_config
from aquiline.checkpoints.eagle.stored import StoredHead
from aquiline.checkpoints.export.engines import ENGINES, FORMATS, refusals, sglang_ids
from aquiline.checkpoints.export.openvino import convert_to_openvino
from aquiline.checkpoints.open import open_head, stored_eagle
from aquiline.models.files import check_output, check_room, write_text
from aquiline.models.tensors import write_folder
from aquiline.targets.target import TargetShape

DRAFT_TOKENS = 3
"""Drafts a step in the serving snippets: what chains pay off with in busy servers."""


@dataclass(frozen=True)
class ExportReport:
    """The files of an export.

    Attributes:
        notes: remarks for the user, one sentence each.
    """

    format: str
    path: str
    files: tuple[str, ...]
    snippet: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        notes = "".join(f"\nnote: {note}" for note in self.notes)
        return f"{self.path} ({self.format}): {', '.join(self.files)}{notes}\n\n{self.snippet}"


def export_head(
    head: str | Path,
    to: str,
    output: str | Path,
    target: TargetShape,
    *,
    target_name: str = "TARGET",
    target_gguf: str | Path | None = None,
) -> ExportReport:
    """Writes a head for an engine, with a README that says how to serve it.

    Args:
        head: its folder or GGUF file; tensors are copied bit by bit.
        output: folder, made if necessary; for "gguf" a folder or a path that ends in .gguf.
        target_name: the target in the snippet, a folder or a hub id.
        target_gguf: for "gguf", the target's own GGUF file, whose tokenizer is copied.

    Raises:
        ValueError: if the engine cannot run this head; says why and which formats can. Also if `output` holds
            anything but an earlier export to this format, because foreign files are never overwritten, or has no room.
    """
    if to not in ENGINES:
        raise ValueError(f"unknown format {to!r}; allowed: {', '.join(FORMATS)}")
    output = Path(output).expanduser()
    _check_output(to, output, Path(head))
    stored = stored_eagle(open_head(head, target))
    reasons = refusals(stored, to, target)
    if reasons:
        others = [name for name in FORMATS if not refusals(stored, name, target)]
        raise ValueError(
            f"this head cannot be exported to {to}: {'; '.join(reasons)}. "
            + (f"Formats that can hold it: {', '.join(others)}" if others else "No engine's format can hold it")
        )
    tensors = [*stored.tensors.values(), *([] if stored.embedding is None else [stored.embedding])]
    check_room(output, sum(tensor.nbytes for tensor in tensors))
    return _WRITERS[to](stored, output, target, target_name, target_gguf)


def _check_output(to: str, output: Path, head: Path) -> None:
    """Raises ValueError if `output` holds anything but an earlier export to this format."""
    check_output(output)
    if head.exists() and output.exists() and output.samefile(head):
        raise ValueError(f"{output} is the head itself, which the export would overwrite; name another folder")
    if to == "gguf" and output.suffix == ".gguf" and not output.is_dir():
        if output.exists() and not is_gguf_head(output):
            raise ValueError(f"{output} exists and is not a draft head, so it is not overwritten; name another file")
        return
    if output.is_file() or (output.is_symlink() and not output.exists()):
        raise ValueError(f"{output} is a file, not a folder; name another folder")
    if not output.is_dir() or not any(output.iterdir()):
        return
    readme = output / "README.md"
    if not readme.is_file() or not readme.read_text(encoding="utf-8", errors="replace").startswith(_heading(to)):
        raise ValueError(
            f"{output} holds files that are not an earlier export to {to}, and they are not overwritten; name a new or "
            "empty folder"
        )


def _heading(to: str) -> str:
    return f"# Draft head for {ENGINES[to].title}\n"


def _write(
    stored: StoredHead, to: str, output: Path, config: dict[str, Any], snippet: str, notes: tuple[str, ...], first: str
) -> ExportReport:
    if stored.fingerprint:
        config["aquiline_target_fingerprint"] = stored.fingerprint
    if stored.gamma is not None:
        config["aquiline_gamma"] = stored.gamma
    if stored.window is not None:
        config["aquiline_window"] = stored.window
    write_folder(output, config, file_tensors(stored, first))
    return _finish(to, output, ("config.json", "model.safetensors"), snippet, notes)


def _finish(to: str, folder: Path, files: tuple[str, ...], snippet: str, notes: tuple[str, ...]) -> ExportReport:
    text = f"{_heading(to)}\nServe it:\n\n```\n{snippet}\n```\n"
    text += "".join(f"\n{note}\n" for note in notes)
    write_text(folder / "README.md", text)
    return ExportReport(to, str(folder), (*files, "README.md"), snippet, notes)


def _safeailab(stored: StoredHead, output: Path, target: TargetShape, name: str, _: Any) -> ExportReport:
    # Only the reference takes `bias` for that of the fc; without the key it adds a random one.
    config = llama_config(stored.config, stored.dtype) | {"bias": stored.config.fc_bias}
    if stored.embedding is not None:
        # With this key, the reference takes the embedding from the checkpoint.
        config["target_hidden_size"] = stored.config.target_hidden_size
    snippet = (
        f"EaModel.from_pretrained(base_model_path={name!r}, ea_model_path={str(output)!r}, "
        f"use_eagle3={stored.config.kind == 'eagle3'})"
    )
    return _write(stored, "safeailab", output, config, snippet, (), "midlayer")


def _speculators(stored: StoredHead, output: Path, target: TargetShape, name: str, _: Any) -> ExportReport:
    config = _speculators_config(stored, name)
    snippet = f"vllm serve {shlex.quote(str(output))}"
    notes = (f"The target is named in config.json: {name}. vLLM and speculators load it from there.",)
    return _write(stored, "speculators", output, config, snippet, notes, "layers.0")


def _speculators_config(stored: StoredHead, target_name: str) -> dict[str, Any]:
    """Returns config.json with every switch explicit, because the defaults of readers differ."""
    config = stored.config
    other_width = config.target_hidden_size != config.hidden_size
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": DRAFT_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if other_width else None,
        "eagle_aux_hidden_state_layer_ids": list(config.features),
        **{flag: getattr(config, flag) for flag in NORM_FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "bias": False,
        "torch_dtype": str(stored.dtype).removeprefix("torch."),
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], "mlp_bias": False, **layer_keys(config)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
    }


def vllm_config(stored: StoredHead) -> dict[str, Any]:
    """Returns config.json as vLLM reads it."""
    config = llama_config(stored.config, stored.dtype)
    if stored.config.kind == "eagle3":
        config["eagle_aux_hidden_state_layer_ids"] = list(stored.config.features)
        config["num_aux_hidden_states"] = len(stored.config.features)
    return config


def _vllm(stored: StoredHead, output: Path, target: TargetShape, name: str, _: Any) -> ExportReport:
    config = vllm_config(stored)
    settings = {"model": str(output), "method": stored.config.kind, "num_speculative_tokens": DRAFT_TOKENS}
    snippet = f"vllm serve {shlex.quote(name)} --speculative-config {shlex.quote(json.dumps(settings))}"
    notes = (
        "vLLM drafts chains only. Always give the method: without it, it is guessed from the folder's name.",
        "Plain and speculative text are equal token for token in float32; in bfloat16 near-ties may differ.",
    )
    return _write(stored, "vllm", output, config, snippet, notes, "midlayer")


def _sglang(stored: StoredHead, output: Path, target: TargetShape, name: str, _: Any) -> ExportReport:
    config = llama_config(stored.config, stored.dtype)
    notes: tuple[str, ...] = ()
    algorithm = "EAGLE3"
    if stored.config.kind == "eagle":
        algorithm, config["architectures"] = "EAGLE", ["LlamaForCausalLMEagle"]
        if not stored.config.fc_bias:
            # SGLang's fc always has a bias, drawn at random where the checkpoint has none.
            zeros = torch.zeros(stored.config.hidden_size, dtype=stored.dtype)
            stored = replace(stored, tensors={**stored.tensors, "fc.bias": zeros})
            notes += ("fc.bias is written as zeros: SGLang's fc always has a bias and would fill it with noise.",)
    else:
        ids = sglang_ids(stored.config.features, target)[0]
        if ids is not None:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
            notes += (f"Layer ids {ids} are as SGLang reads them since May 2026 (pull request 25454).",)
    snippet = (
        f"python -m sglang.launch_server --model-path {shlex.quote(name)} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(str(output))} --speculative-num-steps {DRAFT_TOKENS} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFT_TOKENS + 1}"
    )
    return _write(stored, "sglang", output, config, snippet, notes, "midlayer")


def _gguf(stored: StoredHead, output: Path, target: TargetShape, name: str, target_gguf: Any) -> ExportReport:
    if target_gguf is None:
        raise ValueError("a GGUF head carries its target's tokenizer: give the target's own GGUF file (target_gguf)")
    file = output if output.suffix == ".gguf" else output / "head.gguf"
    write_gguf_head(file, stored, Path(target_gguf))
    snippet = (
        f"llama-server -m {shlex.quote(str(target_gguf))} -md {shlex.quote(str(file))} "
        f"--spec-type draft-eagle3 --spec-draft-n-max {DRAFT_TOKENS}"
    )
    if output.suffix == ".gguf":
        return ExportReport("gguf", str(file), (file.name,), snippet)
    return _finish("gguf", output, (file.name,), snippet, ())


def _openvino(stored: StoredHead, output: Path, target: TargetShape, name: str, _: Any) -> ExportReport:
    files = convert_to_openvino(stored, output)
    snippet = (
        "import openvino_genai as ov\n"
        f'draft = ov.draft_model({str(output)!r}, "CPU")\n'
        f'pipe = ov.LLMPipeline({name + "-openvino"!r}, "CPU", draft_model=draft)\n'
        f'print(pipe.generate("Hello", max_new_tokens=64, num_assistant_tokens={DRAFT_TOKENS}))'
    )
    notes = ("The target must be an OpenVINO model: optimum-cli export openvino -m TARGET OUT",)
    return _finish("openvino", output, files, snippet, notes)


_WRITERS: dict[str, Callable[[StoredHead, Path, TargetShape, str, Any], ExportReport]] = {
    "safeailab": _safeailab,
    "speculators": _speculators,
    "vllm": _vllm,
    "sglang": _sglang,
    "gguf": _gguf,
    "openvino": _openvino,
}
