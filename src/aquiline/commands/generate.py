"""aquiline generate: prompts in, text out."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from aquiline.commands.common import (
    add_model_options,
    add_sampling_options,
    load_model,
    params_of,
    read_prompts,
    stats_record,
)

if TYPE_CHECKING:
    from aquiline.stats import GenerationStats


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("prompt", nargs="*", help="prompts; each is a user's turn (default: standard input)")
    parser.add_argument("--file", help="file with a prompt on each line")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object per output")
    parser.add_argument("--profile", action="store_true", help="print where the time went")
    add_model_options(parser)
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    prompts = read_prompts(arguments.prompt, arguments.file)
    loaded = load_model(arguments)
    params = params_of(arguments, loaded)
    outputs = []
    single = len(prompts) == 1 and params.n == 1
    for event in loaded.stream(prompts, params, raw=arguments.raw):
        if single and not arguments.json:
            print(event.text, end="", flush=True)
        if event.output is not None:
            outputs.append((event.index, event.output))
    for index, output in sorted(outputs, key=lambda pair: pair[0]):
        if arguments.json:
            record = {
                "prompt": prompts[index // params.n],
                "text": output.text,
                "token_ids": list(output.token_ids),
                "finish_reason": output.finish_reason,
                "stats": stats_record(output.stats),
            }
            print(json.dumps(record, ensure_ascii=False))
        elif single:
            print()
        else:
            print(f"--- {index + 1}: {prompts[index // params.n]}\n{output.text}")
    if not arguments.quiet and not arguments.json:
        for _, output in outputs[:1] if single else []:
            stats = output.stats
            print(
                f"[{stats.emitted} tokens, {stats.tokens_per_second:.1f} tokens/s, "
                f"{stats.mean_accept_length:.2f} per forward, ended by {output.finish_reason}]",
                file=sys.stderr,
            )
    if arguments.profile:
        for _, output in outputs:
            print_profile(output.stats)
    return 0


def print_profile(stats: GenerationStats) -> None:
    """Prints a table of seconds per phase to standard error."""
    from rich.console import Console
    from rich.table import Table

    total = sum(stats.seconds.values()) or 1.0
    table = Table(title="where the time went")
    for column in ("phase", "seconds", "share", "ms per step"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase, seconds in sorted(stats.seconds.items(), key=lambda item: -item[1]):
        per_step = f"{1000 * seconds / max(stats.steps, 1):.3f}" if phase != "prefill" else ""
        table.add_row(phase, f"{seconds:.3f}", f"{seconds / total:.1%}", per_step)
    Console(stderr=True).print(table)
