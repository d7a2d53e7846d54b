"""Compares acceptance in llama.cpp with our own chain drafting, same prompts, same k, float32.

    python interop/llamacpp_acceptance.py HEAD --llamacpp SOURCE --build BUILD [--k 3] [--limit 128]

The target becomes a float32 GGUF file by llama.cpp's own converter; the head by our export.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import counts_table, encode_prompts, load_target, our_chain, read_prompts
from transformers import AutoTokenizer

from aquiline.checkpoints.export import export_head
from aquiline.checkpoints.target_shape import target_shape
from aquiline.checkpoints.targets import resolve_target


def convert_target(source: Path, folder: Path, output: Path) -> None:
    """Writes the target as float32 GGUF with llama.cpp's converter."""
    environment = {**os.environ, "PYTHONPATH": str(source / "gguf-py")}
    command = [sys.executable, "convert_hf_to_gguf.py", str(folder), "--outtype", "f32", "--outfile", str(output)]
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)


def run_one(program: Path, target: Path, head: Path | None, prompt: str, k: int, limit: int) -> dict[str, Any]:
    """Runs one prompt; returns its text and the counts that llama.cpp prints."""
    command = [str(program), "-m", str(target), "-p", prompt, "-n", str(limit), "--temp", "0", "-t", "2"]
    command += ["-c", "1024", "-fit", "off", "-lv", "5", "--color", "off"]
    command += ["-md", str(head), "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(k)]
    command += ["--spec-draft-p-min", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{(done.stderr or done.stdout)[-4000:]}")
    found = re.search(r"#calls\(b,g,a\) = +\d+ +\d+ +(\d+).*?#acc rate/pos = \(([^)]*)\)", done.stderr + done.stdout)
    if found is None:
        raise SystemExit(f"llama.cpp printed no statistics:\n{done.stderr[-3000:]}")
    calls = int(found[1])
    accepted = [round(float(rate) * calls) for rate in found[2].split(",")]
    return {"text": done.stdout, "drafts": calls, "accepted": accepted + [0] * (k - len(accepted))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--llamacpp", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    args = parser.parse_args()
    folder = resolve_target(args.target, print)
    prompts, end = encode_prompts(folder, read_prompts(args.prompts))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as name:
        target, head = Path(name) / "target.gguf", Path(name) / "head.gguf"
        convert_target(args.llamacpp, folder, target)
        print(export_head(args.head, "gguf", head, target_shape(folder), target_gguf=target))
        program = args.build / "bin" / "llama-speculative-simple"
        runs = [run_one(program, target, head, tokenizer.decode(ids), args.k, args.limit) for ids in prompts]
    theirs = {
        "drafts": sum(run["drafts"] for run in runs),
        "accepted": [sum(run["accepted"][i] for run in runs) for i in range(args.k)],
    }
    # llama.cpp stops when it has more than `limit` tokens.
    ours = our_chain(load_target(folder), args.head, prompts, end, args.k, args.limit + 1, from_prompt=True)
    print(counts_table("llama.cpp", ours, theirs))
    same = 0
    for ids, run in zip(ours["outputs"], runs, strict=True):
        text = tokenizer.decode([i for i in ids if i not in end])
        same += text.strip() in run["text"]
    print(f"Texts with drafts, llama.cpp and Aquiline: {same} of {len(runs)} equal.")
    if args.json:
        args.json.write_text(json.dumps({"ours": ours, "llamacpp": theirs, "texts": [run["text"] for run in runs]}))


if __name__ == "__main__":
    main()
