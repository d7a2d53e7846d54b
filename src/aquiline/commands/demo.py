"""aquiline demo: answers once with and once without drafts, and compares the speeds."""

from __future__ import annotations

import argparse
import json
import statistics
from typing import TYPE_CHECKING

from aquiline.commands.common import add_model_options, load_model

if TYPE_CHECKING:
    from aquiline.engine.request import GenerationOutput
    from aquiline.loading import Loaded

PROMPT = "Give me five tips for learning a new language, with a short explanation of each."


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="a user's turn")
    parser.add_argument(
        "--max-new-tokens", type=int, default=160, metavar="N", help="length of the answer (tokens ≥ 1; default: 160)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="timed runs of each mode, alternating (≥ 1; default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if arguments.repeats < 1:
        raise ValueError(f"--repeats is {arguments.repeats}; allowed: ≥ 1")
    loaded = load_model(arguments)
    plain = loaded.plain()
    show = not arguments.json
    outputs: dict[str, list[GenerationOutput]] = {"plain": [], "speculative": []}
    for way, model in (("speculative", loaded), ("plain", plain)):
        if show:
            print(f"\n=== {way} ===")
        _generate(model, arguments, show)  # A warm-up that the user can read.
    for _ in range(arguments.repeats):
        outputs["plain"].append(_generate(plain, arguments, False))
        outputs["speculative"].append(_generate(loaded, arguments, False))
    return _report(loaded, outputs, arguments.json)


def _generate(model: Loaded, arguments: argparse.Namespace, show: bool) -> GenerationOutput:
    for event in model.stream(arguments.prompt, temperature=0.0, max_new_tokens=arguments.max_new_tokens):
        if show:
            print(event.text, end="", flush=True)
        if event.output is not None:
            result = event.output
    if show:
        print()
    return result


def _report(loaded: Loaded, outputs: dict[str, list[GenerationOutput]], as_json: bool) -> int:
    from rich.console import Console
    from rich.table import Table

    speeds = {way: statistics.median(o.stats.tokens_per_second for o in runs) for way, runs in outputs.items()}
    first = {way: runs[0] for way, runs in outputs.items()}
    identical = all(o.token_ids == first["plain"].token_ids for runs in outputs.values() for o in runs)
    if not all(speeds.values()):
        raise ValueError(
            f"the answer has {len(first['plain'].token_ids)} tokens, too few to time; use another prompt or raise "
            "--max-new-tokens"
        )
    speedup = speeds["speculative"] / speeds["plain"]
    tau = first["speculative"].stats.mean_accept_length
    if as_json:
        record = {"draft": loaded.draft_name, "tokens_per_second": speeds, "speedup": speedup, "tau": tau}
        print(json.dumps(record | {"identical": identical, "tokens": len(first["plain"].token_ids)}))
        return 0
    table = Table(title=f"{len(first['plain'].token_ids)} tokens, draft: {loaded.draft_name}")
    for column in ("", "tokens/s", "speedup", "tokens per forward (τ)"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("plain", f"{speeds['plain']:.1f}", "1.00×", "1.00")
    table.add_row("speculative", f"{speeds['speculative']:.1f}", f"{speedup:.2f}×", f"{tau:.2f}")
    Console().print(table)
    if identical:
        print("tokens: identical")
        return 0
    print(_difference(first["plain"].token_ids, first["speculative"].token_ids, str(loaded.target.dtype)))
    return 0


def _difference(plain: list[int], other: list[int], dtype: str) -> str:
    from aquiline.engine.text import common_prefix

    same, kind = common_prefix(plain, other), dtype.removeprefix("torch.")
    return (
        f"tokens: the first {same} of {len(plain)} agree; then {kind} rounding decides between two nearly equal "
        "logits (with --dtype float32 the outputs are identical)"
    )
