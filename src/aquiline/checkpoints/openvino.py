"""EAGLE-3 heads for OpenVINO GenAI, converted by optimum-intel's own command."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from aquiline.checkpoints.safeailab import file_tensors, llama_config, write_folder
from aquiline.checkpoints.stored_head import StoredHead

_WEIGHT_FORMATS = {"torch.float32": "fp32", "torch.float64": "fp32", "torch.float16": "fp16", "torch.bfloat16": "fp32"}
COMMAND_VARIABLE = "AQUILINE_OPTIMUM_CLI"


def convert_to_openvino(stored: StoredHead, output: Path, weight_format: str | None = None) -> tuple[str, ...]:
    """Writes the head's OpenVINO graph with `optimum-cli export openvino`.

    Args:
        stored: an EAGLE-3 head.
        output: folder, made if need be.
        weight_format: fp32, fp16, int8 …; None loses nothing.

    Returns:
        Names of the files.

    Raises:
        ValueError: if the command is not installed.
        RuntimeError: if it fails; with the end of what it said.
    """
    command = os.environ.get(COMMAND_VARIABLE) or shutil.which("optimum-cli")
    if command is None:
        raise ValueError(
            "optimum-cli is not installed; install optimum-intel (in an environment of its own, see docs/interop.md) "
            f"and name it in {COMMAND_VARIABLE}"
        )
    chosen = weight_format or _WEIGHT_FORMATS[str(stored.dtype)]
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        write_folder(scratch, llama_config(stored.config, stored.dtype), file_tensors(stored))
        arguments = ["export", "openvino", "-m", scratch, "--task", "text-generation-with-past"]
        # The draft network is optimum-intel's own; without this flag it would load a plain Llama.
        arguments += ["--trust-remote-code", "--weight-format", chosen, str(output)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([command, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not list(output.glob("openvino_model.xml")):
        raise RuntimeError(f"optimum-cli failed ({done.returncode}): {(done.stderr or done.stdout)[-2000:]}")
    return tuple(sorted(path.name for path in output.iterdir() if path.name != "README.md"))
