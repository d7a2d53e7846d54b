"""Compares acceptance in llama.cpp with our own chain drafting, same prompts, same k, float32.

    python interop/llamacpp_acceptance.py HEAD --llamacpp SOURCE --build BUILD [--k 4] [--limit 96] [--prompts 24]

The target becomes a float32 GGUF file by llama.cpp's own converter; the head by our export. LLAMACPP_PACKAGES
names a folder with what the converter imports and this environment lacks. Converted models and the results of each
prompt are kept under interop/.work, so an interrupted run resumes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

from common import Task, checked, conclude, our_chains, parser, task_of
from pieces import WORK, Run, add, collect, digest
from transformers import AutoTokenizer

from aquiline.checkpoints.export.layouts import export_head
from aquiline.models.cache_folder import build_once
from aquiline.models.resolve import target_fingerprint
from aquiline.targets.loading import target_shape


def converted_target(source: Path, task: Task, version: str, form: str = "f32") -> Path:
    """The target as GGUF, written once with llama.cpp's converter."""

    def build(folder: Path) -> None:
        print("converting the target", flush=True)
        packages = [str(source / "gguf-py"), os.environ.get("LLAMACPP_PACKAGES", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, packages))}
        command = [sys.executable, "convert_hf_to_gguf.py", str(task.target), "--outtype", form]
        command += ["--outfile", str(folder / "target.gguf")]
        done = subprocess.run(
            command, cwd=source, env=environment, check=False, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            raise SystemExit(f"convert_hf_to_gguf.py ended with {done.returncode}:\n{done.stderr[-3000:]}")

    stamp = {"target": target_fingerprint(task.target), "llama.cpp": version, "form": form}
    folder = WORK / f"llamacpp-{task.target.name}-{digest(*stamp.values())}"
    return build_once(folder, stamp, build) / "target.gguf"


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs one of llama.cpp's programs."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
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
    """Returns what a program printed after the prompt, up to the empty line that ends it."""
    at = printed.find(prompt)
    if at < 0:
        raise SystemExit(f"llama.cpp did not print the prompt, but:\n{printed[:2000]}")
    return printed[at + len(prompt) :].rstrip()


def same_text(left: str, right: str) -> bool:
    """Equal, up to a different budget: the longer continues the shorter."""
    left, right = left.strip(), right.strip()
    return left.startswith(right) or right.startswith(left)


def drafted(task: Task, prompts: dict[tuple[int, ...], str], program: Path, target: Path, head: Path) -> Run:
    """Makes pieces of prompts with drafts; `prompts` are the texts of token ids."""

    def run_all(rest: list[list[int]], file: TextIO) -> None:
        for ids in rest:
            piece = run_drafted(program, target, head, prompts[tuple(ids)], task.k, task.limit)
            if piece.pop("prompt_tokens") != len(ids):
                raise SystemExit("llama.cpp reads the prompts as other tokens")
            add(file, {"prompts": [ids], "outputs": [piece.pop("text")], **piece})

    return run_all


def plain(task: Task, prompts: dict[tuple[int, ...], str], program: Path, target: Path) -> Run:
    """Makes pieces of prompts without drafts."""

    def run_all(rest: list[list[int]], file: TextIO) -> None:
        for ids in rest:
            add(file, {"prompts": [ids], "outputs": [run_plain(program, target, prompts[tuple(ids)], task.limit)]})

    return run_all


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--llamacpp", type=Path, required=True)
    options.add_argument("--build", type=Path, required=True)
    options.add_argument("--version", default="unknown", help="of the sources, for the summary")
    args = checked(options)
    task = task_of(args)
    tokenizer = AutoTokenizer.from_pretrained(task.target)
    prompts = {tuple(ids): tokenizer.decode(ids) for ids in task.prompts}
    target = converted_target(args.llamacpp, task, args.version)
    head = WORK / f"{task.name('llamacpp')}.gguf"
    print(export_head(task.head, "gguf", head, target_shape(task.target), target_gguf=target), flush=True)
    series, programs = f"llamacpp-{args.version}", args.build / "bin"
    run = drafted(task, prompts, programs / "llama-speculative-simple", target, head)
    theirs = collect(f"{task.name(series)}-{digest(head)}", task.prompts, run, "llama.cpp with drafts")
    run = plain(task, prompts, programs / "llama-simple", target)
    plainly = collect(task.plain_name(f"{series}-plain"), task.prompts, run, "llama.cpp, plain")
    ours = our_chains(task, like_llamacpp=True)
    texts = [tokenizer.decode([i for i in tokens if i not in task.end]) for tokens in ours["outputs"]]
    agreed = [
        f"{sum(same_text(a, b) for a, b in zip(theirs['outputs'], other, strict=True))} of {len(other)} equal texts"
        for other in (texts, plainly["outputs"])
    ]
    engine = f"llama.cpp (llama-cpp-python {args.version})"
    conclude(task, "llamacpp", engine, ours, theirs, (agreed[0], agreed[1]))


if __name__ == "__main__":
    main()
