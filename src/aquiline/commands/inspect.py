"""aquiline inspect: describes a draft head, how its files were read, and its fit to a target."""

from __future__ import annotations

import argparse
import dataclasses
import json


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("head", help="folder, GGUF file, hub id or shipped head")
    parser.add_argument("--target", help="check that it fits this alias, folder, GGUF file or hub id")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    group = parser.add_argument_group("where the checkpoint is silent or wrong")
    group.add_argument("--layer-ids", choices=("boundary", "output"), help="how to read its layer ids")
    group.add_argument(
        "--norm-before-residual", action=argparse.BooleanOptionalAction, default=None, help="the residual is normed"
    )
    group.add_argument("--rope-theta", type=float, metavar="N", help="base of the rotary frequencies (> 0)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from aquiline.checkpoints.eagle.reading import HeadChoices
    from aquiline.checkpoints.open import open_head, trained_for
    from aquiline.models.resolve import resolve_target
    from aquiline.targets.loading import target_shape

    target = None if arguments.target is None else resolve_target(arguments.target)
    choices = HeadChoices(arguments.layer_ids, arguments.norm_before_residual, arguments.rope_theta)
    head = open_head(arguments.head, None if target is None else target_shape(target), choices)
    same = None if target is None else trained_for(head, target)
    fingerprint = {
        None: None,
        True: "this very target",
        False: "ANOTHER target of the same sizes: its drafts may rarely be accepted",
    }[same]
    if arguments.json:
        record = dataclasses.asdict(head.report) | ({} if fingerprint is None else {"fingerprint_check": fingerprint})
        print(json.dumps(record, indent=2, default=str, ensure_ascii=False))
        return 0
    print(head.report)
    if fingerprint is not None:
        print(f"  {'fingerprint':<12} {fingerprint}")
    return 0
