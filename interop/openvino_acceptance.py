"""Compares acceptance in OpenVINO GenAI with our own chain drafting, same prompts, same k, float32.

python interop/openvino_acceptance.py HEAD --python OPENVINO_PYTHON [--k 4] [--limit 128] [--prompts 32]
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

from aquiline.checkpoints.export import export_head
from aquiline.checkpoints.target_shape import target_shape
from aquiline.checkpoints.targets import resolve_target


def run(command: list[str], log: Path) -> None:
    """Runs a command; shows the end of what it said if it fails."""
    with log.open("w") as stream:
        result = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False)
    if result.returncode:
        print(log.read_text()[-6000:], file=sys.stderr)
        raise SystemExit(f"{command[0]} failed")


def run_engine(python: str, job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Runs engine_openvino.py in OpenVINO's environment."""
    (scratch / "job.json").write_text(json.dumps(job))
    files = [str(scratch / "job.json"), str(scratch / "out.json")]
    run([python, str(HERE / "engine_openvino.py"), *files], scratch / "engine.log")
    return json.loads((scratch / "out.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--python", required=True, help="interpreter of the environment with OpenVINO GenAI")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--json", type=Path, help="where to write counts and agreement")
    args = parser.parse_args()

    folder = resolve_target(args.target, print)
    prompts, end = encode_prompts(folder, read_prompts(args.prompts))
    job = {"k": args.k, "limit": args.limit, "end": end, "prompts": prompts}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        target, head = str(scratch / "target"), str(scratch / "head")
        settings = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        optimum = os.environ["AQUILINE_OPTIMUM_CLI"]
        run([optimum, "export", "openvino", "-m", str(folder), *settings, target], scratch / "target.log")
        print(export_head(args.head, "openvino", head, target_shape(folder), target_name=str(folder)))
        plain = run_engine(args.python, {**job, "target": target, "head": None}, scratch)
        theirs = run_engine(args.python, {**job, "target": target, "head": head}, scratch)
    ours = our_chain(load_target(folder), args.head, prompts, end, args.k, args.limit)
    print(f"OpenVINO GenAI {theirs['versions']['openvino_genai']}: its own counters say {theirs['counters']}")
    print(compare("OpenVINO", ours, theirs, plain))
    if args.json:
        settings = {"k": args.k, "limit": args.limit, "prompts": len(prompts), "versions": theirs["versions"]}
        agreements = agreement(theirs["outputs"], ours["outputs"]), agreement(theirs["outputs"], plain["outputs"])
        engine = f"OpenVINO GenAI {theirs['versions']['openvino_genai']}"
        write_summary(
            args.json, summary(args.head, engine, ours, theirs, agreements, counters=theirs["counters"], **settings)
        )
    if not within(ours, theirs):
        raise SystemExit("the counts differ by more than 2 %")


if __name__ == "__main__":
    main()
