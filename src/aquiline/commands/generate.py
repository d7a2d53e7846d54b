"""aquiline generate: generates text for prompts."""

from __future__ import annotations

import argparse
import json
import logging
from typing import TYPE_CHECKING

from aquiline.commands.common import (
    add_model_options,
    add_sampling_options,
    load_model,
    output_record,
    params_of,
)
from aquiline.commands.prompts import add_template_options, read_file, read_prompts, template_arguments

if TYPE_CHECKING:
    from aquiline.engine.request import GenerationOutput
    from aquiline.stats import GenerationStats

logger = logging.getLogger("aquiline")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("prompt", nargs="*", help="prompts, each a user's turn (default: standard input)")
    parser.add_argument("--file", help="one prompt per line (.jsonl: texts, messages or token ids); - reads stdin")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument(
        "--prediction", metavar="FILE", help="a text that the outputs are expected to repeat, such as the one to edit"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per output")
    parser.add_argument("--profile", action="store_true", help="print the time spent in each phase")
    add_template_options(parser)
    add_model_options(parser)
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; prints each output as soon as it and all earlier ones are finished."""
    prompts = read_prompts(arguments.prompt, arguments.file)
    template = template_arguments(arguments)
    prediction = None if arguments.prediction is None else read_file("--prediction", arguments.prediction)
    loaded = load_model(arguments)
    params = params_of(arguments, loaded)
    single = len(prompts) == 1 and params.n == 1
    order = [(index, sample) for index in range(len(prompts)) for sample in range(params.n)]
    outputs: dict[tuple[int, int], GenerationOutput] = {}
    shown = 0
    for event in loaded.stream(prompts, params, raw=arguments.raw, prediction=prediction, **template):
        if single and not arguments.json:
            print(event.text, end="", flush=True)
        if event.output is not None:
            outputs[event.index, event.sample] = event.output
        while shown < len(order) and order[shown] in outputs:
            index, sample = order[shown]
            output, prompt = outputs[index, sample], prompts[index]
            if arguments.json:
                print(json.dumps(output_record(prompt, output, params), ensure_ascii=False), flush=True)
            elif single:
                print()
            else:
                print(f"--- {index + 1}.{sample + 1}: {prompt}\n{output.text}", flush=True)
            shown += 1
    _summarise([outputs[key] for key in order])
    if arguments.profile:
        print_profile([output.stats for output in outputs.values()])
    failed = [(key, output.error) for key, output in sorted(outputs.items()) if output.error is not None]
    for (index, _), error in failed:
        logger.error("prompt %d of %d ended with an error: %s", index + 1, len(prompts), error)
    return 1 if failed else 0


def _summarise(outputs: list[GenerationOutput]) -> None:
    for output in outputs:
        stats = output.stats
        logger.info(
            "[%d tokens, %.1f tokens/s, %.2f per forward, ended by %s]",
            stats.emitted,
            stats.tokens_per_second,
            stats.mean_accept_length,
            output.finish_reason,
        )


def print_profile(all_stats: list[GenerationStats]) -> None:
    """Prints a table of seconds per phase to standard error."""
    from rich.console import Console
    from rich.table import Table

    seconds: dict[str, float] = {}
    for stats in all_stats:
        for phase, spent in stats.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    steps, total = sum(stats.steps for stats in all_stats), sum(seconds.values()) or 1.0
    # Rows of one batch each count its seconds.
    table = Table(title="where the time went" + (" (summed over outputs)" if len(all_stats) > 1 else ""))
    for column in ("phase", "seconds", "share", "ms per step"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        per_step = f"{1000 * spent / max(steps, 1):.3f}" if phase != "prefill" else ""
        table.add_row(phase, f"{spent:.3f}", f"{spent / total:.1%}", per_step)
    Console(stderr=True).print(table)
