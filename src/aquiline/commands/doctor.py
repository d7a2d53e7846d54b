"""aquiline doctor: reports what this machine supports, what is slow, and why."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aquiline.native.library import Library


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    facts, advice = examine()
    if arguments.json:
        print(json.dumps({"facts": facts, "advice": advice}, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title="this machine", show_header=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    console = Console()
    console.print(table)
    for line in advice:
        console.print(f"• {line}", markup=False)
    return 0


def examine() -> tuple[dict[str, Any], list[str]]:
    """Returns (facts by name, lines of advice)."""
    import torch

    from aquiline.bench.environment import cpu_name, package_version
    from aquiline.native.library import find_library
    from aquiline.targets.packed import fast_bfloat16

    library, why = find_library()
    capability = torch.backends.cpu.get_cpu_capability()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: package_version(name) or "missing" for name in ("transformers", "tokenizers", "safetensors")},
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": capability,
        "fast bfloat16 in PyTorch": fast_bfloat16(torch.device("cpu")),
        "native kernels": why if library else False,
        **{f"path, {name}": _path(library, name) for name in ("bfloat16", "float32")},
        "cuda": _on_gpu("cuda", torch.cuda.get_device_name()) if torch.cuda.is_available() else False,
        "mps": _on_gpu("mps", platform.machine()) if torch.backends.mps.is_available() else False,
        "extras": [name for name in ("accelerate", "pyarrow", "datasets", "llguidance", "shtab") if find_spec(name)],
    }
    return facts, [*([] if library else [f"the native kernels do not run: {why}"]), *_advice(facts)]


def _path(library: Library | None, dtype: str) -> str:
    """Describes what computes a decoder's forwards in a dtype on the CPU."""
    import torch

    from aquiline.targets.packed import packable

    if library is not None:
        return (
            f"native kernels ({library.instructions if dtype == 'bfloat16' else library.vectors}), the same bits always"
        )
    packed = packable(getattr(torch, dtype), torch.device("cpu"))
    return "PyTorch, packed weights (oneDNN)" if packed else "PyTorch"


def _on_gpu(device: str, name: str) -> str:
    from aquiline.engine.opening import weights_dtype

    return f"{name}, {str(weights_dtype(None, device)).removeprefix('torch.')} by default"


def _advice(facts: dict[str, Any]) -> list[str]:
    lines = []
    if not facts["fast bfloat16 in PyTorch"] and not facts["native kernels"]:
        lines.append("this processor lacks fast bfloat16: the default is float32, which reads twice the bytes")
    if facts["cuda"] or facts["mps"]:
        lines.append(
            "GPUs were only checked on a pretended device, CUDA graphs as recorded kernels on the CPU: compare outputs "
            "with --device cpu, and measure with benchmarks/gpu.py of the repository"
        )
    if facts["threads"] != facts["cores"]:
        lines.append(
            f"PyTorch uses {facts['threads']} threads on {facts['cores']} cores; set --threads or OMP_NUM_THREADS"
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > (facts["cores"] or 1) * 0.7:
        helps = "" if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" else "; OMP_WAIT_POLICY=passive helps"
        lines.append(f"the machine is busy (load {load:.1f}): timings will be noisy{helps}")
    return lines or ["no problems found"]
