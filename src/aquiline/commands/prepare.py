"""aquiline prepare: conversations → training set, or their answers in the target's own words."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aquiline.commands.common import add_setting_options, given_settings
from aquiline.commands.prompts import add_template_options, template_settings


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from aquiline.checks import meanings
    from aquiline.training.data.replies import RegenerateSettings
    from aquiline.training.settings import PrepareSettings

    parser.add_argument("sources", nargs="+", help="ShareGPT JSON, messages JSONL(.gz), Parquet, Arrow, dataset names")
    parser.add_argument("--output", required=True, help="folder of the training set; a .jsonl file with --regenerate")
    parser.add_argument("--target", default="smollm2", help="whose tokenizer and template (default: smollm2)")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja chat template in place of the tokenizer's own")
    add_template_options(parser, tools=False)
    add_setting_options(parser, PrepareSettings, set(meanings(PrepareSettings)))
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--json", action="store_true", help="machine-readable report")
    group = parser.add_argument_group("regeneration")
    group.add_argument("--regenerate", action="store_true", help="replace the answers by the target's own words")
    group.add_argument(
        "--endpoint", metavar="URL", help="ask this OpenAI-compatible server instead of the local engine"
    )
    group.add_argument("--model", default="smollm2", help="served model (with --endpoint; default: smollm2)")
    group.add_argument(
        "--temperature",
        type=float,
        action="append",
        metavar="N",
        help="0 is greedy; repeat it for an even mixture (≥ 0; default: 0 and 0.8)",
    )
    group.add_argument(
        "--max-new-tokens", type=int, default=384, metavar="N", help="budget of an answer (tokens ≥ 1; default: 384)"
    )
    add_setting_options(group, RegenerateSettings, set(meanings(RegenerateSettings)) - {"limit"})


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if arguments.regenerate:
        if arguments.chat_template:
            raise ValueError("--chat-template has no effect with --regenerate, which asks the target; leave it out")
        if arguments.endpoint and arguments.chat_template_kwargs:
            raise ValueError("--chat-template-kwargs has no effect with --endpoint; configure the server")
        return _regenerate(arguments)
    if arguments.endpoint:
        raise ValueError("--endpoint has no effect without --regenerate; add it or drop the endpoint")
    from aquiline.models.resolve import resolve_target
    from aquiline.training.data.prepare import prepare
    from aquiline.training.settings import PrepareSettings

    report = prepare(
        arguments.sources,
        resolve_target(arguments.target),
        arguments.output,
        **dataclasses.asdict(PrepareSettings(**given_settings(arguments, PrepareSettings))),
        chat_template=_template(arguments.chat_template),
        chat_template_kwargs=template_settings(arguments),
        overwrite=arguments.overwrite,
        progress=not arguments.quiet,
    )
    _print(report, arguments.json)
    return 0


def _template(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {file!r} cannot be read ({error}); give a file with a template") from error


def _print(report: Any, as_json: bool) -> None:
    print(json.dumps(dataclasses.asdict(report), default=str) if as_json else report)


def _regenerate(arguments: argparse.Namespace) -> int:
    from aquiline.training.data.regenerate import regenerate
    from aquiline.training.data.replies import RegenerateSettings, ReplySampling

    temperatures = arguments.temperature or [0.0, 0.8]
    mixture = tuple((ReplySampling(t, 1.0, arguments.max_new_tokens), 1.0) for t in temperatures)
    given = {"mixture": mixture, **given_settings(arguments, RegenerateSettings)}
    RegenerateSettings(**given)  # rejects a bad one before a model is loaded
    if arguments.endpoint is None:
        rows = given.setdefault("batch_size", 64)
        complete, given["in_flight"] = _local(arguments, rows), 1
    else:
        given.setdefault("in_flight", 32)
        complete, given["batch_size"] = _endpoint(arguments), 1
    progress = None if arguments.quiet else _show
    report = regenerate(arguments.sources, arguments.output, complete, progress=progress, **given)
    if not arguments.quiet:
        print(file=sys.stderr)
    _print(report, arguments.json)
    return 0


def _show(counts: Counter[str]) -> None:
    text = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


def _endpoint(arguments: argparse.Namespace) -> Any:
    import os

    from aquiline.training.data.endpoint import Endpoint

    return Endpoint(arguments.endpoint, arguments.model, os.environ.get("OPENAI_API_KEY"))


def _local(arguments: argparse.Namespace, rows: int) -> Any:
    """A `Complete` that answers with our own engine, all requests of a call in one batch."""
    from aquiline.engine.generate import generate_requests
    from aquiline.engine.request import Request
    from aquiline.engine.text import encode_prompt
    from aquiline.loading import load
    from aquiline.sampling import SamplingParams
    from aquiline.training.data.replies import Reply, ReplyRequest, ReplySampling

    settings = template_settings(arguments)
    # Large batches are bound by arithmetic: a draft would only add to it.
    loaded = load(arguments.target, None, max_rows=rows)
    limit = loaded.target.shape.max_positions

    def complete(requests: Sequence[ReplyRequest], sampling: ReplySampling) -> list[Reply]:
        replies = [Reply("", False, f"history longer than the context of {limit} tokens") for _ in requests]
        prepared = {}
        for index, request in enumerate(requests):
            messages = [{"role": m.role, "content": m.content} for m in request.messages]
            tokens = encode_prompt(loaded.engine.tokenizer, messages, chat_template_kwargs=settings)
            if len(tokens) + sampling.max_new_tokens <= limit:
                params = SamplingParams(**dataclasses.asdict(sampling), seed=request.seed)
                prepared[index] = Request(tokens, params)
        outputs = generate_requests(loaded.engine, list(prepared.values()))
        for index, output in zip(prepared, outputs, strict=True):
            if output.error is not None:
                raise output.error
            replies[index] = Reply(output.text, output.finish_reason != "length")
        return replies

    return complete
