"""Compares acceptance in real vLLM with our own chain drafting, same prompts, same k, float32.

python interop/vllm_acceptance.py HEAD --python VLLM_PYTHON [--k 4] [--limit 128] [--prompts 32]

VLLM_PRELOAD names the libraries that vLLM's processes preload.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import (
    HERE,
    agreement,
    compare,
    encode_prompts,
    load_target,
    our_chain,
    read_prompts,
    summary,
    within,
    write_summary,
)

from aquiline.checkpoints.targets import resolve_target


def run_vllm(python: str, job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Runs engine_vllm.py in vLLM's environment."""
    (scratch / "job.json").write_text(json.dumps(job))
    command = [python, str(HERE / "engine_vllm.py"), str(scratch / "job.json"), str(scratch / "out.json")]
    environment = {**os.environ, "LD_PRELOAD": os.environ.get("VLLM_PRELOAD", "")}
    with (scratch / "vllm.log").open("w") as log:
        result = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, env=environment)
    if result.returncode:
        print((scratch / "vllm.log").read_text()[-6000:], file=sys.stderr)
        raise SystemExit("vLLM failed")
    return json.loads((scratch / "out.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--python", required=True, help="interpreter of the environment with vLLM")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8, help="requests at a time in vLLM")
    parser.add_argument("--json", type=Path, help="where to write counts and agreement")
    parser.add_argument("--raw", type=Path, help="where to write all outputs as well")
    parser.add_argument("--plain", type=Path, help="--raw of an earlier run whose plain outputs to take (same prompts)")
    args = parser.parse_args()

    folder = resolve_target(args.target, print)
    prompts, end = encode_prompts(folder, read_prompts(args.prompts))
    method = "eagle3" if "Eagle3" in (args.head / "config.json").read_text() else "eagle"
    job = {
        "target": str(folder),
        "head": str(args.head.resolve()),
        "method": method,
        "k": args.k,
        "limit": args.limit,
        "rows": args.rows,
        "end": end,
        "prompts": prompts,
    }
    with tempfile.TemporaryDirectory() as scratch:
        theirs = run_vllm(args.python, job, Path(scratch))
        print(f"vLLM {theirs['versions']['vllm']}: {theirs['drafts']} drafts, {theirs['accepted']}", flush=True)
        if args.plain:
            plain = json.loads(args.plain.read_text())["vllm_plain"]
        else:
            plain = run_vllm(args.python, {**job, "head": None}, Path(scratch))
    ours = our_chain(load_target(folder), args.head, prompts, end, args.k, args.limit)
    print(compare("vLLM", ours, theirs, plain))
    if args.raw:
        args.raw.write_text(json.dumps({"ours": ours, "vllm": theirs, "vllm_plain": plain}))
    if args.json:
        settings = {"k": args.k, "limit": args.limit, "prompts": len(prompts), "versions": theirs["versions"]}
        agreements = agreement(theirs["outputs"], ours["outputs"]), agreement(theirs["outputs"], plain["outputs"])
        engine = f"vLLM {theirs['versions']['vllm']}"
        write_summary(args.json, summary(args.head, engine, ours, theirs, agreements, **settings))
    if not within(ours, theirs):
        raise SystemExit("the counts differ by more than 2 %")


if __name__ == "__main__":
    main()
