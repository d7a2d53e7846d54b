"""Compares acceptance in llama.cpp with our own chain drafting, same prompts, same k, float32.

    python interop/llamacpp_acceptance.py HEAD --llamacpp SOURCE --build BUILD [--k 4] [--limit 128]

The target becomes a float32 GGUF file by llama.cpp's own converter; the head by our export. LLAMACPP_PACKAGES
names a folder with what the converter imports and this environment lacks.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import (
    counts_table,
    encode_prompts,
    load_target,
    our_chain,
    read_prompts,
    summary,
    within,
    write_summary,
)
from transformers import AutoTokenizer

from aquiline.checkpoints.export import export_head
from aquiline.checkpoints.target_shape import target_shape
from aquiline.checkpoints.targets import resolve_target


def convert_target(source: Path, folder: Path, output: Path) -> None:
    """Writes the target as float32 GGUF with llama.cpp's converter."""
    packages = [str(source / "gguf-py"), os.environ.get("LLAMACPP_PACKAGES", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, packages))}
    command = [sys.executable, "convert_hf_to_gguf.py", str(folder), "--outtype", "f32", "--outfile", str(output)]
    done = subprocess.run(command, cwd=source, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"convert_hf_to_gguf.py ended with {done.returncode}:\n{done.stderr[-3000:]}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs one of llama.cpp's programs."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{(done.stderr or done.stdout)[-4000:]}")
    return done


def run_drafted(program: Path, target: Path, head: Path, prompt: str, k: int, limit: int) -> dict[str, Any]:
    """Runs one prompt with drafts; returns its new text and the counts that llama.cpp prints."""
    command = [str(program), "-m", str(target), "-p", prompt, "-n", str(limit), "--temp", "0"]
    command += ["-t", str(os.cpu_count()), "-c", "1024", "-fit", "off", "-lv", "5", "--color", "off"]
    command += ["-md", str(head), "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(k)]
    command += ["--spec-draft-p-min", "0"]
    done = run(command)
    said = done.stderr + done.stdout
    counts = re.search(r"#calls\(b,g,a\) = +\d+ +\d+ +(\d+).*?#acc rate/pos = \(([^)]*)\)", said)
    encoded = re.search(r"encoded +(\d+) tokens", said)
    if counts is None or encoded is None:
        raise SystemExit(f"llama.cpp printed no statistics:\n{said[-3000:]}")
    calls = int(counts[1])
    accepted = [round(float(rate) * calls) for rate in counts[2].split(",")]
    return {
        "text": new_text(done.stdout, prompt),
        "prompt_tokens": int(encoded[1]),
        "drafts": calls,
        "accepted": accepted + [0] * (k - len(accepted)),
    }


def run_plain(program: Path, target: Path, prompt: str, limit: int) -> str:
    """llama.cpp's own greedy decoding of one prompt, without drafts."""
    return new_text(run([str(program), "-m", str(target), "-n", str(limit), prompt]).stdout, prompt)


def new_text(printed: str, prompt: str) -> str:
    """What a program printed behind the prompt, up to the empty line that ends it."""
    at = printed.find(prompt)
    if at < 0:
        raise SystemExit(f"llama.cpp did not print the prompt, but:\n{printed[:2000]}")
    return printed[at + len(prompt) :].rstrip()


def same_text(left: str, right: str) -> bool:
    """Equal, up to a different budget: the longer goes on where the shorter ends."""
    left, right = left.strip(), right.strip()
    return left.startswith(right) or right.startswith(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--llamacpp", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--version", default="unknown", help="of the sources, for the summary")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--json", type=Path, help="where to write counts and agreement")
    args = parser.parse_args()
    folder = resolve_target(args.target, print)
    ids, end = encode_prompts(folder, read_prompts(args.prompts))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.decode(prompt) for prompt in ids]
    with tempfile.TemporaryDirectory() as name:
        target, head = Path(name) / "target.gguf", Path(name) / "head.gguf"
        convert_target(args.llamacpp, folder, target)
        print(export_head(args.head, "gguf", head, target_shape(folder), target_gguf=target))
        bin_folder = args.build / "bin"
        drafted = [
            run_drafted(bin_folder / "llama-speculative-simple", target, head, prompt, args.k, args.limit)
            for prompt in prompts
        ]
        plain = [run_plain(bin_folder / "llama-simple", target, prompt, args.limit) for prompt in prompts]
    if [run["prompt_tokens"] for run in drafted] != [len(prompt) for prompt in ids]:
        raise SystemExit("llama.cpp reads the prompts as other tokens")
    theirs = {
        "drafts": sum(run["drafts"] for run in drafted),
        "accepted": [sum(run["accepted"][i] for run in drafted) for i in range(args.k)],
    }
    ours = our_chain(load_target(folder), args.head, ids, end, args.k, args.limit, like_llamacpp=True)
    print(counts_table("llama.cpp", ours, theirs))
    texts = [tokenizer.decode([i for i in tokens if i not in end]) for tokens in ours["outputs"]]
    with_ours = sum(same_text(run["text"], text) for run, text in zip(drafted, texts, strict=True))
    with_plain = sum(same_text(run["text"], text) for run, text in zip(drafted, plain, strict=True))
    agreements = f"{with_ours} of {len(texts)} equal texts", f"{with_plain} of {len(texts)} equal texts"
    print(f"Texts with drafts, llama.cpp and Aquiline: {agreements[0]}.")
    print(f"Texts of llama.cpp with drafts and plain: {agreements[1]}.")
    if args.json:
        settings = {"k": args.k, "limit": args.limit, "prompts": len(prompts)}
        engine = f"llama.cpp (llama-cpp-python {args.version})"
        write_summary(args.json, summary(args.head, engine, ours, theirs, agreements, **settings))
    if not within(ours, theirs):
        raise SystemExit("the counts differ by more than 2 %")


if __name__ == "__main__":
    main()
