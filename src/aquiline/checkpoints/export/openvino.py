"""Converts EAGLE-3 heads for OpenVINO GenAI with optimum-intel's own command."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from aquiline.checkpoints.eagle.safeailab import file_tensors, llama_config
from aquiline.checkpoints.eagle.stored import StoredHead
from aquiline.models.files import filling
from aquiline.models.tensors import write_folder

_GRAPH = "openvino_model.xml"
_EAGLE3_MARK = '<eagle3_mode value="True" />'
_WEIGHT_FORMATS = {"torch.float32": "fp32", "torch.float64": "fp32", "torch.float16": "fp16", "torch.bfloat16": "fp32"}
COMMAND_VARIABLE = "AQUILINE_OPTIMUM_CLI"


def convert_to_openvino(stored: StoredHead, output: Path) -> tuple[str, ...]:
    """Writes the head's OpenVINO graph with `optimum-cli export openvino`.

    Returns:
        Names of the files.

    Raises:
        ValueError: if the command is not installed.
        RuntimeError: if it fails or writes another kind of graph; ends with its output.
    """
    named = os.environ.get(COMMAND_VARIABLE)
    command = shutil.which(named or "optimum-cli")
    if command is None:
        raise ValueError(
            (f"{COMMAND_VARIABLE} is {named!r}, no program that runs" if named else "optimum-cli is not installed")
            + "; install optimum-intel (in an environment of its own, see docs/interop.md) and name its optimum-cli in "
            f"{COMMAND_VARIABLE}"
        )
    chosen = _WEIGHT_FORMATS[str(stored.dtype)]  # loses no bits
    with filling(output) as made, tempfile.TemporaryDirectory() as source:
        write_folder(source, llama_config(stored.config, stored.dtype), file_tensors(stored))
        arguments = ["export", "openvino", "-m", source, "--task", "text-generation-with-past"]
        # The draft network is optimum-intel's own; without this flag it would load a plain Llama.
        arguments += ["--trust-remote-code", "--weight-format", chosen, str(made)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([command, *arguments], env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not (made / _GRAPH).is_file():
            said = (done.stderr or done.stdout)[-2000:] or f"it wrote no {_GRAPH}"
            raise RuntimeError(f"optimum-cli failed ({done.returncode}): {said}")
        _name_layers(made / _GRAPH, [int(feature) - 1 for feature in stored.config.features])
        return tuple(sorted(path.name for path in made.iterdir()))


def _name_layers(graph: Path, outputs: list[int]) -> None:
    """Adds the target's layers that the head reads to a graph, counted as outputs.

    Without this list, OpenVINO GenAI takes the outputs of the layers 2, n//2 and n−3; the reference takes their
    inputs, so the head would read features one layer too late.
    """
    text = graph.read_text(encoding="utf-8")
    if text.count(_EAGLE3_MARK) != 1:
        raise RuntimeError(
            f"optimum-cli wrote a graph without {_EAGLE3_MARK}, so OpenVINO GenAI would not run it as an EAGLE-3 head; "
            "use the version of optimum-intel that interop/run_openvino.sh installs"
        )
    layers = f'<hidden_layers_list value="{" ".join(map(str, outputs))}" />'
    graph.write_text(text.replace(_EAGLE3_MARK, f"{_EAGLE3_MARK}\n\t\t{layers}"), encoding="utf-8")
