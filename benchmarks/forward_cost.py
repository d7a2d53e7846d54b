"""Times one forward: our native, packed and reference decoders beside transformers, interleaved.

    python benchmarks/forward_cost.py --dtype bfloat16

Every round times each implementation at each width once, so that a disturbance of the machine
meets all of them; the table has the medians. The forwards return the logits of all T positions.
Writes benchmarks/results/forward-cost-<dtype>.json and .md. Paths that the machine lacks
are left out; the run fails without the native one, unless --allow-reference is given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.bench.environment import cpu_name
from aquiline.cache import commit
from aquiline.drafters.eagle_network import DraftHead, HeadConfig, build_network, forward_network, new_draft_cache
from aquiline.drafters.native import NativeNetwork, native_network
from aquiline.models.embedded import fetch_embedded
from aquiline.native.library import find_library
from aquiline.targets.loading import load_target
from aquiline.targets.native import native
from aquiline.targets.packed import packed
from aquiline.targets.rope import RotaryTable
from aquiline.targets.target import Target, TargetInput

LEVELS = 5
RESULTS = Path(__file__).parent / "results"
Run = Callable[[], object]


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    folder = options.target or fetch_embedded("smollm2")
    reference = load_target(folder, dtype, torch.device("cpu"))
    fast = native(reference)
    if fast is None and not options.allow_reference:
        raise SystemExit(
            f"error: no native kernels for {options.dtype} here; pass --allow-reference to measure the rest"
        )
    paths = {"native": fast, "packed": packed(reference), "reference": reference}
    library = find_library()[0]
    if library is not None and library.squeezes and dtype == torch.bfloat16:
        paths["native, 16 bits a weight"] = native(reference, replace(library, squeezes=False))
    implementations = {name: path for name, path in paths.items() if path is not None}
    runs: dict[tuple[str, int], Run] = {}
    for name, target in implementations.items():
        runs |= {(name, width): run for width, run in our_forwards(target, options.context, options.widths).items()}
    hf = load_hf(folder, dtype)
    runs |= {("transformers", width): run for width, run in hf_forwards(hf, options.context, options.widths).items()}
    runs |= draft_steps(dtype, options.context, options.widths)
    with torch.inference_mode():
        times = interleave(runs, options.rounds)
        generation = generate_both(fast or reference, hf, options.new_tokens, options.generate_rounds)
    report = {
        "path": fast.describe() if fast is not None else "reference",
        "environment": environment(options),
        "milliseconds": [
            {
                "implementation": name,
                "width": width,
                "median": statistics.median(t),
                "fastest": min(t),
                "rounds": len(t),
            }
            for (name, width), t in times.items()
        ],
        "generate_tokens_per_second": generation,
    }
    write(report, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="model folder (default: the embedded SmolLM2)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--context", type=int, default=256, help="committed tokens")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="tokens in one forward")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--new-tokens", type=int, default=64, help="length of the generations; 0 skips them")
    parser.add_argument("--generate-rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--allow-reference", action="store_true")
    parser.add_argument("--note", default="", help="circumstances worth keeping with the results")
    return parser.parse_args()


def prompt(length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))


def our_forwards(target: Target, context: int, widths: list[int]) -> dict[int, Run]:
    """One forward of each width after `context` tokens."""
    cache = target.new_cache(1, context + max(widths))
    tokens = prompt(context, target.shape.vocab_size)
    none = torch.empty(1, 0, dtype=torch.int64)
    target.forward(TargetInput(tokens, torch.arange(context)[None], None, cache, [0], logits_at=none))
    commit(cache, torch.arange(context)[None], [0])

    def forward(width: int) -> Run:
        new, positions = prompt(width, target.shape.vocab_size), context + torch.arange(width)[None]
        return lambda: target.forward(TargetInput(new, positions, None, cache, [0])).logits

    return {width: forward(width) for width in widths}


def load_hf(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def hf_forwards(model: Any, context: int, widths: list[int]) -> dict[int, Run]:
    """As `our_forwards`; each call removes its tokens from the cache again."""
    from transformers import DynamicCache

    vocabulary, cache = model.config.vocab_size, DynamicCache()
    with torch.inference_mode():
        model(prompt(context, vocabulary), past_key_values=cache, use_cache=True)

    def forward(width: int) -> Run:
        new = prompt(width, vocabulary)

        def run() -> object:
            logits = model(new, past_key_values=cache, use_cache=True).logits
            cache.crop(-width)
            return logits

        return run

    return {width: forward(width) for width in widths}


def draft_steps(dtype: torch.dtype, context: int, widths: list[int]) -> dict[tuple[str, int], Run]:
    """A level of an EAGLE-3 draft: network and logits of `width` siblings (random weights).

    Five levels in a row, as in a cycle: only the first finds the weights evicted by the target's.
    """
    from aquiline.targets.decoder import config_from_hf

    sizes = config_from_hf(json.loads((fetch_embedded("smollm2") / "config.json").read_text()))
    hidden = sizes.layer.hidden_size
    config = HeadConfig("eagle3", sizes.layer, sizes.vocab_size, 8192, hidden, features=(2, 15, 27))
    torch.manual_seed(0)
    head = DraftHead(build_network(config).to(dtype).requires_grad_(False))
    rotary = RotaryTable(sizes.layer.rope, dtype)

    def step(network: Any, width: int) -> Run:
        cache = new_draft_cache(head.network, 1, context + width, sizes.max_positions)
        cache.lengths[0] = context
        embedded, feedback = (torch.randn(1, width, hidden).to(dtype) for _ in range(2))
        positions = torch.full((1, width), context)
        siblings = torch.eye(width, dtype=torch.bool)[None]
        arguments = (embedded, feedback, positions, siblings, cache, [0], rotary)

        def run() -> object:
            for _ in range(LEVELS):
                if isinstance(network, NativeNetwork):
                    logits = network.logits(network.forward(*arguments))
                else:
                    logits = network.logits(forward_network(network, *arguments))
            return logits

        return run

    networks = {
        f"{LEVELS} draft levels, native": native_network(head.network),
        f"{LEVELS} draft levels, packed": packed(head.network),
        f"{LEVELS} draft levels, reference": head.network,
    }
    return {(name, width): step(n, width) for name, n in networks.items() if n is not None for width in widths}


def interleave(runs: dict[tuple[str, int], Run], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Milliseconds of `rounds` calls of each, in turn, after two unmeasured rounds."""
    times: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for round_number in range(-2, rounds):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            if round_number >= 0:
                times[key].append(1000 * (time.perf_counter() - start))
    return times


def generate_both(target: Target, model: Any, new_tokens: int, rounds: int) -> dict[str, float] | None:
    """Greedy tokens per second of a bare loop over `target.forward` and of transformers' generate."""
    if new_tokens < 1:
        return None
    tokens = prompt(100, target.shape.vocab_size)
    times: dict[str, list[float]] = {"bare loop": [], "transformers generate": []}
    for _ in range(rounds):
        start = time.perf_counter()
        bare_loop(target, tokens, new_tokens)
        times["bare loop"].append(time.perf_counter() - start)
        start = time.perf_counter()
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
        times["transformers generate"].append(time.perf_counter() - start)
    return {name: new_tokens / statistics.median(seconds) for name, seconds in times.items()}


def bare_loop(target: Target, tokens: Tensor, new_tokens: int) -> list[int]:
    cache = target.new_cache(1, tokens.shape[1] + new_tokens)
    length, result = 0, []
    for _ in range(new_tokens):
        width = tokens.shape[1]
        positions = length + torch.arange(width)[None]
        last = torch.tensor([[width - 1]])
        logits = target.forward(TargetInput(tokens, positions, None, cache, [0], logits_at=last)).logits
        commit(cache, torch.arange(width)[None], [0])
        length += width
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        result.append(int(tokens))
    return result


def environment(options: argparse.Namespace) -> dict[str, Any]:
    import transformers

    return {
        "cpu": cpu_name(),
        "threads": options.threads,
        "context": options.context,
        "dtype": options.dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_average": os.getloadavg()[0],
        "read_gigabytes_per_second": round(bandwidth(), 1),
        "note": options.note,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def bandwidth() -> float:
    """GB/s at which all threads together sum 256 MB."""
    block, best = torch.ones(64 * 2**20), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - start)
    return block.nbytes / best / 1e9


def write(report: dict[str, Any], options: argparse.Namespace) -> None:
    rows = {(r["implementation"], r["width"]): r["median"] for r in report["milliseconds"]}
    names = list(dict.fromkeys(name for name, _ in rows))
    lines = [f"Milliseconds (median) after {options.context} tokens; {report['path']}; {report['environment']}", ""]
    lines += ["| tokens | " + " | ".join(map(str, options.widths)) + " |", "|---" * (len(options.widths) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{rows[name, w]:.2f}" for w in options.widths) + " |" for name in names]
    speeds = report["generate_tokens_per_second"]
    if speeds:
        lines += ["", "Greedy tokens/s: " + ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())]
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"forward-cost-{options.dtype}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
