"""Describes the machine and the versions of a measurement."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from aquiline.bench.methods import Bed


def environment(bed: Bed) -> dict[str, Any]:
    """Returns hardware, versions, threads and dtype as JSON-serialisable values."""
    device = bed.target.device
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _total_memory(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": getattr(bed.target, "form", None) or str(bed.target.dtype).removeprefix("torch."),
        "target": bed.name,
        "target_class": type(bed.target).__name__,
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in ("aquiline", "torch", "transformers", "numpy")},
    }


def package_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def environment_line(results: Mapping[str, Any]) -> str:
    """Formats the environment of a run in one line."""
    e = results["environment"]
    spread = e["plain_spread"]
    noise = f"; plain runs of a prompt differ by {spread['median']:.1%} (median)" if spread["pairs"] else ""
    return (
        f"{e['target']} in {e['dtype']} ({e['target_class']}) on {e['cpu']}, {e['device']}, {e['cores']} cores, "
        f"{e['threads']} threads; torch {e['versions']['torch']}, transformers {e['versions']['transformers']}, "
        f"aquiline {e['versions']['aquiline']}, Python {e['python']}; seed {results['settings']['seed']}, "
        f"{results['settings']['max_new_tokens']} tokens{noise}."
    )
