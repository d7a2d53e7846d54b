"""Measures decoding and training on a GPU, in under 12 minutes.

    python benchmarks/gpu.py                           # SmolLM2 and its head on CUDA
    python benchmarks/gpu.py --target FOLDER --draft HEAD
    python benchmarks/gpu.py --device cpu --smoke      # a random model, seconds: does the script run?

Measures a plain token against the bandwidth bound (the weights' bytes over the rate of a device copy) in the
reference, with joined projections, replayed as a CUDA graph, and compiled; forwards of 1 to 64 nodes and a cycle's
phases with graphs and without; trees of 8 to 64 nodes, batches of 1 to 32 rows, and training steps on random
conversations. Writes gpu-<device>.json and .md into benchmarks/results, and nothing in smoke form. Where there is no
CUDA, "graph" means the same forwards of few shapes, called.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from aquiline.checkpoints.open import read_head
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.eagle_network import DraftHead, HeadConfig, build_network
from aquiline.drafters.trees import Chain, DynamicTree, TreePolicy
from aquiline.engine.generate import generate_requests
from aquiline.engine.opening import open_target
from aquiline.engine.request import Engine, Request
from aquiline.models.resolve import resolve_target
from aquiline.sampling import SamplingParams
from aquiline.stats import GenerationStats
from aquiline.targets.decoder import Decoder, config_from_hf
from aquiline.targets.static import StaticDecoder
from aquiline.targets.target import Target, TargetInput
from aquiline.training.data.dataset import FORMAT, SplitWriter, TokenisedConversation
from aquiline.training.run import start_run
from aquiline.training.settings import TrainSettings
from aquiline.training.step import optimiser_step
from aquiline.tree import ancestors, depths

RESULTS = Path(__file__).parent / "results"
WIDTHS, TREES, BATCHES = (1, 2, 4, 8, 16, 32, 64), (8, 16, 32, 64), (1, 2, 4, 8, 16, 32)
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    options = parse()
    began = time.perf_counter()
    target, head = random_models(options.device) if options.smoke else models(options)
    graphs = StaticDecoder(target)
    report: dict[str, Any] = {"environment": environment(target, options)}
    for name, measure in (
        ("plain", lambda: plain(target, options)),
        ("forward, ms by width", lambda: beside(target, graphs, lambda form: forwards(form, options))),
        ("cycle", lambda: beside(target, graphs, lambda form: cycle(form, head, options))),
        ("trees", lambda: trees(graphs, head, options)),
        ("batches", lambda: batches(graphs, head, options)),
        ("training", lambda: training(target, options)),
    ):
        report[name] = measure()
        print(f"{name}, after {time.perf_counter() - began:.0f} s: {json.dumps(report[name])}", flush=True)
    text = table(report)
    print(text)
    if not options.smoke:
        RESULTS.mkdir(exist_ok=True)
        stem = RESULTS / f"gpu-{report['environment']['device'].replace(' ', '-').lower()}"
        stem.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(text, encoding="utf-8")


def models(options: argparse.Namespace) -> tuple[Decoder, DraftHead]:
    """The target and the head that the options name, on the device."""
    _, target, _ = open_target(options.target, object(), options.dtype, options.device)
    if not isinstance(target, Decoder):
        raise SystemExit(f"{options.target} is not computed by Aquiline's own decoder; choose a Llama or Qwen model")
    return target, read_head(options.draft, target.shape, target.dtype)


def random_models(device: str) -> tuple[Decoder, DraftHead]:
    """A tiny random target and head."""
    torch.manual_seed(0)
    config = config_from_hf(TINY)
    head = HeadConfig("eagle3", config.layer, 512, 512, 64, (2, 4, 5))
    target = Decoder(config).to(device).eval().requires_grad_(False)
    return target, DraftHead(build_network(head).eval().requires_grad_(False))


def environment(target: Decoder, options: argparse.Namespace) -> dict[str, Any]:
    on_cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if on_cuda else str(target.device),
        "capability": list(torch.cuda.get_device_capability(target.device)) if on_cuda else None,
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": "random" if options.smoke else options.target,
        "layers": target.config.num_layers,
        "torch": torch.__version__,
    }


def beside(
    kernels: Target, graph: Target, measure: Callable[[Target], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """The figures of both forms, by name."""
    one, other = measure(kernels), measure(graph)
    return {name: {"kernels": one[name], "graph": other[name]} for name in one}


def milliseconds(target: Target, work: Callable[[], Any], rounds: int) -> float:
    """Median over rounds, each waited for."""
    times = []
    for _ in range(rounds + 2):
        _wait(target.device)
        began = time.perf_counter()
        work()
        _wait(target.device)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def plain(target: Decoder, options: argparse.Namespace) -> dict[str, float]:
    """A plain token in all forms of the decoder, and the time that reading its weights takes at least."""
    block = torch.empty(1 << (20 if options.smoke else 30), dtype=torch.uint8, device=target.device)
    copied = milliseconds(target, lambda: block.clone(), 5)
    rate = 2 * block.numel() / copied * 1e3
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in target.parameters()}.values())
    found = {"GB/s of a copy": rate / 1e9, "weights, MB": weights / 1e6, "bound, ms": weights / rate * 1e3}
    found["reference, ms"] = generation(target, None, 1, options)["ms per token"]
    target.join()
    found["joined, ms"] = generation(target, None, 1, options)["ms per token"]
    found["graph, ms"] = generation(StaticDecoder(target), None, 1, options)["ms per token"]
    if not options.smoke:  # minutes of compiling
        found["compiled graph, ms"] = generation(StaticDecoder(target, "inductor"), None, 1, options)["ms per token"]
    return found | {"share of the bound": found["bound, ms"] / found["graph, ms"]}


@torch.inference_mode()
def forwards(target: Target, options: argparse.Namespace) -> dict[str, float]:
    """Forwards of a tree of W nodes after a context, without the loop."""
    cache = target.new_cache(1, options.context + max(WIDTHS))
    cache.lengths[0] = options.context
    found = {}
    for width in WIDTHS:
        parents = torch.tensor([[-1, *((node - 1) // 2 for node in range(1, width))]])
        positions = (options.context + depths(parents)).to(target.device)
        seen = None if width == 1 else ancestors(parents).to(target.device)
        found[str(width)] = milliseconds(
            target, lambda p=positions, s=seen: target.forward(TargetInput(p, p, s, cache, [0])), options.rounds
        )
    return found


def generation(target: Target, drafter: Drafter | None, rows: int, options: argparse.Namespace) -> dict[str, float]:
    """Greedy text of `rows` prompts at once, after the same run, which warms up and captures the graphs."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, target.shape.vocab_size, (rows, options.context), generator=generator).tolist()
    engine = Engine(target, drafter, None, (), max_rows=rows)
    requests = [Request(prompt, SamplingParams(max_new_tokens=options.tokens)) for prompt in prompts]
    generate_requests(engine, requests)
    stats, seconds = GenerationStats(), 0.0
    for output in generate_requests(engine, requests):
        stats.add(output.stats)
        seconds = max(seconds, output.stats.decode_seconds)
    return {
        "ms per token": 1e3 * seconds / options.tokens,
        "tokens/s": stats.emitted / seconds,
        "tau": stats.mean_accept_length,
        **{f"{phase}, ms": 1e3 * s / stats.steps for phase, s in stats.seconds.items() if phase != "prefill"},
    }


def cycle(target: Target, head: DraftHead, options: argparse.Namespace) -> dict[str, float]:
    """The phases of a cycle that drafts a chain of five; on a device, a phase ends where the host waits."""
    return generation(target, drafter(target, head, Chain(5)), 1, options)


def trees(target: Target, head: DraftHead, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Dynamic trees by their number of nodes."""
    policies = {str(nodes): DynamicTree(nodes, 6, 8) for nodes in (TREES[:2] if options.smoke else TREES)}
    return {name: generation(target, drafter(target, head, policy), 1, options) for name, policy in policies.items()}


def batches(target: Target, head: DraftHead, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Plain decoding and chains by the number of rows, in tokens per second."""
    chain = drafter(target, head, Chain(4))
    return {
        str(rows): {
            "plain": generation(target, None, rows, options)["tokens/s"],
            "chain": generation(target, chain, rows, options)["tokens/s"],
        }
        for rows in (BATCHES[:2] if options.smoke else BATCHES)
    }


def drafter(target: Target, head: DraftHead, policy: TreePolicy) -> EagleDrafter:
    return EagleDrafter(head, target, policy, packed=True)


def training(target: Decoder, options: argparse.Namespace) -> dict[str, float]:
    """Positions per second of an EAGLE-3 head's training steps; what the conversations say does not matter."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "target")
        if options.smoke:
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
            save_file(
                {name: weight.clone() for name, weight in target.state_dict().items()}, folder / "model.safetensors"
            )
        else:
            folder = resolve_target(options.target)
        data = random_set(Path(scratch, "set"), target.shape.vocab_size, options.context)
        run = start_run(TrainSettings(str(folder), (str(data),), scratch, max_length=options.context))
        optimiser_step(run)
        speeds = []
        for _ in range(3):
            _wait(target.device)
            before, began = run.seen, time.perf_counter()
            optimiser_step(run)
            _wait(target.device)
            speeds.append((run.seen - before) / (time.perf_counter() - began))
    return {"positions/s": statistics.median(speeds)}


def random_set(folder: Path, vocabulary: int, length: int) -> Path:
    """A training set of random conversations, half of each the assistant's."""
    folder.mkdir()
    generator, counts = np.random.default_rng(0), {}
    for split, number in (("train", 64), ("validation", 1)):
        with SplitWriter(folder / f"{split}.arrow") as writer:
            for name in map(str, range(number)):
                ids = generator.integers(0, vocabulary, length, dtype=np.int32)
                writer.add(TokenisedConversation(ids, np.arange(length) >= length // 2, name, name))
        counts[split] = asdict(writer.counts)
    manifest = {"format": FORMAT, "tokenizer_hash": None, "counts": counts}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    where = report["environment"]
    lines = [f"# {where['target']} in {where['dtype']} on {where['device']}", ""]
    for name, found in report.items():
        if name == "environment":
            continue
        nested = isinstance(next(iter(found.values())), dict)
        columns: Sequence[str] = list(next(iter(found.values()))) if nested else ["value"]
        lines += [f"| {name} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        for row, values in found.items():
            cells = [f"{v:.2f}" for v in (values.values() if nested else [values])]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="a target that Aquiline's own decoder computes")
    parser.add_argument("--draft", default="smollm2-eagle3", help="an EAGLE head for it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", help="of the weights; default: the fast one on the device")
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=20, help="repetitions of each forward")
    parser.add_argument("--smoke", action="store_true", help="a random model and few tokens; figures mean nothing")
    options = parser.parse_args()
    if options.smoke:
        options.context, options.tokens, options.rounds = 24, 6, 2
    return options


if __name__ == "__main__":
    main()
