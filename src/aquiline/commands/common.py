"""Options that several subcommands share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aquiline.loading import Loaded
    from aquiline.sampling import SamplingParams
    from aquiline.stats import GenerationStats


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Target, draft, tree, dtype, device."""
    group = parser.add_argument_group("model")
    group.add_argument("--target", default="smollm2", help="alias, folder, GGUF file or hub id (default: smollm2)")
    group.add_argument(
        "--draft", default="auto", help="auto, none, prompt-lookup, a head's folder or hub id (default: auto)"
    )
    group.add_argument("--tree", help="chain:DEPTH, static, dynamic:NODES,DEPTH,TOPK, or a file from `aquiline tune`")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="default: fastest here")
    group.add_argument("--device", default="cpu", help="default: cpu")
    group.add_argument("--rows", type=int, default=8, help="requests that decode together (default: 8)")
    group.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    group.add_argument(
        "--lossy",
        metavar="RULE",
        help="LOSSY: typical[:EPSILON,DELTA] or threshold:SINGLE,ACCUMULATED; changes the output distribution",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Fields of `SamplingParams`; what is not given stays the model's default."""
    group = parser.add_argument_group("sampling")
    for name, kind, text in (
        ("max-new-tokens", int, "most tokens to emit (default: 128)"),
        ("min-new-tokens", int, "no end before this many"),
        ("temperature", float, "0 is greedy"),
        ("top-k", int, "keep the k likeliest tokens"),
        ("top-p", float, "keep this much probability"),
        ("min-p", float, "drop tokens below this share of the likeliest"),
        ("seed", int, "same seed, same output"),
        ("repetition-penalty", float, "1 is off"),
        ("presence-penalty", float, "0 is off"),
        ("frequency-penalty", float, "0 is off"),
        ("n", int, "outputs per prompt"),
    ):
        group.add_argument(f"--{name}", type=kind, help=text)
    group.add_argument("--stop", action="append", help="a string that ends the output (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="do not stop at end tokens")


def sampling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given."""
    names = (
        "max_new_tokens",
        "min_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "n",
        "ignore_eos",
    )
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.stop:
        given["stop"] = tuple(arguments.stop)
    return given


def parse_tree(text: str | None) -> Any:
    """Reads --tree.

    Raises:
        ValueError: if it is none of the forms.
    """
    from aquiline.drafters.tree_policy import Chain, DynamicTree, StaticTree

    if text is None or Path(text).is_file():
        return text
    kind, _, numbers = text.partition(":")
    try:
        values = [int(value) for value in numbers.split(",")] if numbers else []
    except ValueError:
        values = []
    if kind == "chain" and len(values) == 1:
        return Chain(values[0])
    if kind == "static" and not numbers:
        return StaticTree()
    if kind == "dynamic" and len(values) == 3:
        return DynamicTree(*values)
    raise ValueError(
        f"--tree {text!r} is not a tree; allowed: chain:DEPTH, static, dynamic:NODES,DEPTH,TOPK, or a file"
    )


def parse_lossy(text: str | None) -> Any:
    """Reads --lossy.

    Raises:
        ValueError: if it is none of the forms.
    """
    from aquiline.verify import LossyRule

    if text is None:
        return None
    kind, _, numbers = text.partition(":")
    try:
        values = [float(value) for value in numbers.split(",")] if numbers else []
    except ValueError:
        values = []
    if kind == "typical" and len(values) in (0, 2):
        return LossyRule("typical", **dict(zip(("epsilon", "delta"), values, strict=False)))
    if kind == "threshold" and len(values) == 2:
        return LossyRule("threshold", single=values[0], accumulated=values[1])
    raise ValueError(
        f"--lossy {text!r} is not a rule; allowed: typical[:EPSILON,DELTA] or threshold:SINGLE,ACCUMULATED"
    )


def load_model(arguments: argparse.Namespace) -> Loaded:
    """Loads what the model options name."""
    import torch

    from aquiline.loading import load

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"--threads is {arguments.threads}; allowed: ≥ 1")
        torch.set_num_threads(arguments.threads)
    draft = None if arguments.draft == "none" else arguments.draft
    loaded = load(
        arguments.target,
        draft,
        tree=parse_tree(arguments.tree),
        dtype=arguments.dtype,
        device=arguments.device,
        lossy=parse_lossy(arguments.lossy),
        max_rows=arguments.rows,
    )
    if not arguments.quiet:
        print(f"drafting: {loaded.draft_name}", file=sys.stderr)
        if arguments.lossy:
            print("LOSSY acceptance: the output distribution differs from the target's", file=sys.stderr)
    return loaded


def read_prompts(words: Sequence[str], file: str | None) -> list[str]:
    """The prompts of the command line, of a file (one a line, or JSON strings), or of standard input.

    Raises:
        ValueError: if there is none.
    """
    if words and file:
        raise ValueError("prompts were given both as arguments and by --file; use one")
    if words:
        return list(words)
    if file:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) if line.startswith('"') else line for line in lines if line.strip()]
    text = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    if not text:
        raise ValueError("no prompt; give it as an argument, with --file, or on standard input")
    return [text]


def stats_record(stats: GenerationStats) -> dict[str, Any]:
    """Counters and rates as JSON-able values."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "emitted": stats.emitted,
        "steps": stats.steps,
        "nodes": stats.nodes,
        "accepted": stats.accepted,
        "mean_accept_length": stats.mean_accept_length,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_second": stats.tokens_per_second,
        "seconds": stats.seconds,
        "lossy": stats.lossy,
    }


def params_of(arguments: argparse.Namespace, loaded: Loaded) -> SamplingParams:
    """The model's defaults with the given options on top."""
    from dataclasses import replace

    return replace(loaded.defaults, **sampling_settings(arguments))
