"""Measures the peak memory of training an EAGLE-3 head on conversations of T tokens, by unrolled steps.

    python benchmarks/training_memory.py --length 2048 --steps 1 4 7

Every setting runs in a process of its own, whose peak resident memory is taken after two optimiser
steps of one conversation each, on random tokens: memory depends on shapes alone. Target, optimiser
and one worker are included. Writes benchmarks/results/training-memory.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from aquiline.models.embedded import fetch_embedded
from aquiline.training.data.dataset import FORMAT, SplitWriter, TokenisedConversation
from aquiline.training.run import keep_freed_memory, start_run
from aquiline.training.settings import TrainSettings
from aquiline.training.step import optimiser_step

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = parse()
    if options.one:
        print(json.dumps(measure(options.target, options.length, options.steps[0], options.recompute)))
        return
    folder = options.target or str(fetch_embedded("smollm2"))
    rows = []
    for recompute in (False, True):
        for steps in options.steps:
            command = [sys.executable, __file__, "--one", "--target", folder, "--length", str(options.length)]
            command += ["--steps", str(steps), *(["--recompute"] if recompute else [])]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append(json.loads(out.splitlines()[-1]))
            print(rows[-1], flush=True)
    report = {"torch": torch.__version__, "length": options.length, "draft_vocab_size": 8192, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "training-memory.json").write_text(json.dumps(report, indent=2) + "\n")


def measure(target: str, length: int, steps: int, recompute: bool) -> dict[str, float]:
    """Peak resident megabytes of this process, before the first step and after the second."""
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as scratch:
        write_random(Path(scratch) / "set", length)
        settings = TrainSettings(
            target=target,
            data=(f"{scratch}/set",),
            output=scratch,
            ttt_steps=steps,
            max_length=length,
            batch_positions=length,
            micro_positions=length,
            recompute=recompute,
            workers=1,
        )
        run = start_run(settings)
        before = peak()
        for _ in range(2):
            optimiser_step(run)
        return {"steps": steps, "recompute": recompute, "loaded_mb": before, "peak_mb": peak()}


def peak() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def write_random(folder: Path, length: int) -> None:
    """A training set of two conversations of `length` tokens, three quarters of them the assistant's."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    counts = {}
    for split in ("train", "validation"):
        with SplitWriter(folder / f"{split}.arrow") as writer:
            for i in range(2):
                tokens = generator.integers(0, 40_000, length).astype(np.int32)
                writer.add(TokenisedConversation(tokens, np.arange(length) >= length // 4, str(i), "random"))
        counts[split] = dataclasses.asdict(writer.counts)
    manifest = {"format": FORMAT, "tokenizer_hash": "random", "counts": counts, "seed": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 7])
    parser.add_argument("--target")
    parser.add_argument("--recompute", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
