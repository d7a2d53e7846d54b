"""aquiline export: writes a draft head in the layout of another engine."""

from __future__ import annotations

import argparse
import dataclasses
import json

from aquiline.commands.common import add_target_option

_FORMATS = ("safeailab", "speculators", "vllm", "sglang", "gguf", "openvino")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("head", help="folder, GGUF file, hub id or shipped head")
    parser.add_argument("--to", required=True, choices=_FORMATS, help="the engine or layout")
    parser.add_argument("--output", help="folder, or a .gguf file (default: HEAD-FORMAT here)")
    add_target_option(parser)
    parser.add_argument("--target-name", help="what the engine calls the target (default: --target)")
    parser.add_argument(
        "--target-gguf",
        metavar="FILE",
        help="for gguf: the target's GGUF file (default: --target's own)",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from aquiline.checkpoints.export.layouts import export_head
    from aquiline.checkpoints.open import resolve_head
    from aquiline.models.embedded import EMBEDDED, embedded_gguf
    from aquiline.models.resolve import resolve_target
    from aquiline.targets.loading import target_shape

    head, target = resolve_head(arguments.head), resolve_target(arguments.target)
    # An alias means something to us alone.
    name = str(target) if arguments.target in EMBEDDED else arguments.target
    gguf = arguments.target_gguf
    if gguf is None and arguments.to == "gguf":
        if arguments.target in EMBEDDED:
            gguf = embedded_gguf(arguments.target)
        elif arguments.target.endswith(".gguf"):
            gguf = arguments.target
    report = export_head(
        head,
        arguments.to,
        arguments.output or f"{head.name.removesuffix('.gguf')}-{arguments.to}",
        target_shape(target),
        target_name=arguments.target_name or name,
        target_gguf=gguf,
    )
    print(json.dumps(dataclasses.asdict(report), indent=2) if arguments.json else report)
    return 0
