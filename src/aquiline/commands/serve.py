"""aquiline serve: serves a target over OpenAI's API, or starts vLLM with its head."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
from pathlib import PurePath

from aquiline.commands.common import MODEL_OPTIONS, add_model_options, load_model, refuse_given

logger = logging.getLogger("aquiline")

_OWN = {
    "host": "127.0.0.1",
    "port": 8000,
    "api_key": None,
    "cors": None,
    "max_queue": 64,
    "timeout": 600.0,
    "served_model_name": None,
    **MODEL_OPTIONS,
}
"""Options of our own server → default; vLLM takes its own flags after --."""

_VLLM: dict[str, object] = {"draft_tokens": None, "dry_run": False, "json": False, "flags": []}
"""Options of --engine vllm → default."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "--engine", default="aquiline", choices=("aquiline", "vllm"), help="the server to start (default: aquiline)"
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1, this machine alone)")
    server.add_argument("--port", type=int, default=8000, help="port; 0 chooses a free one (default: 8000)")
    server.add_argument("--api-key", help="key that requests must carry (default: AQUILINE_API_KEY, else none)")
    server.add_argument(
        "--cors", action="append", metavar="ORIGIN", help="web page that may call the server: https://host (repeatable)"
    )
    server.add_argument(
        "--max-queue", type=int, default=64, metavar="N", help="outputs that may wait for a row (default: 64)"
    )
    server.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="longest time of a request (default: 600)"
    )
    server.add_argument("--served-model-name", metavar="NAME", help="the model's name in requests (default: --target)")
    add_model_options(parser)
    vllm = parser.add_argument_group("--engine vllm")
    vllm.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags for vLLM's server")
    vllm.add_argument("--draft-tokens", type=int, help="length of the draft chains (default: 3)")
    vllm.add_argument(
        "--dry-run", action="store_true", help="run all checks, then print the command instead of starting it"
    )
    vllm.add_argument("--json", action="store_true", help="with --dry-run: print the command as a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command: our own server until it is told to stop; vLLM in place of this process."""
    own = arguments.engine == "aquiline"
    remedy = "add --engine vllm" if own else "drop it, or give vLLM its own flags after --"
    refuse_given(arguments, _VLLM if own else _OWN, f"--engine {arguments.engine}", remedy)
    return _serve(arguments) if own else _serve_vllm(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    import os

    from aquiline.checks import check_value
    from aquiline.serve.run import run_server
    from aquiline.serve.server import ServerSettings

    check_value("--port", arguments.port, 0 <= arguments.port < 1 << 16, "0 … 65535")
    check_value("--max-queue", arguments.max_queue, arguments.max_queue >= 0, "an integer ≥ 0")
    check_value("--timeout", arguments.timeout, 0 < arguments.timeout < float("inf"), "a number of seconds > 0")
    key = arguments.api_key if arguments.api_key is not None else os.environ.get("AQUILINE_API_KEY") or None
    check_value("--api-key", key, key != "", "a text that is not empty")
    origins = tuple(arguments.cors or ())
    for origin in origins:
        good = origin.startswith(("http://", "https://")) and origin.count("/") == 2
        check_value("--cors", origin, good, "an origin such as https://example.org, without a path")
    # A folder's name is enough: its path is nobody's business.
    name = arguments.served_model_name or PurePath(arguments.target).name
    if key is None and arguments.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("anyone who reaches %s may use this server; set --api-key", arguments.host)
    settings = ServerSettings(
        arguments.host, arguments.port, name, key, origins, arguments.max_queue, arguments.timeout
    )

    def ready(url: str, loaded: object) -> None:
        print(f"ready: {url} (model {name}, drafting: {getattr(loaded, 'draft_name', '')})", flush=True)

    run_server(settings, lambda: load_model(arguments), ready)
    return 0


def _serve_vllm(arguments: argparse.Namespace) -> int:
    if arguments.json and not arguments.dry_run:
        raise ValueError("--json has no effect without --dry-run; add --dry-run")
    from aquiline.checkpoints.open import shipped_for
    from aquiline.models.resolve import resolve_target
    from aquiline.serve.vllm import launch, vllm_command

    target = resolve_target(arguments.target)
    heads = shipped_for(target) if arguments.draft == "auto" else [arguments.draft]
    if not heads:
        raise ValueError(
            f"no shipped head was trained for {arguments.target}; give one with --draft, or train it: "
            f"`aquiline train DATA --target {arguments.target} --output FOLDER`"
        )
    # A dry run does not require vLLM: the command may be meant for another machine.
    program = "vllm" if arguments.dry_run else None
    length = {} if arguments.draft_tokens is None else {"num_draft_tokens": arguments.draft_tokens}
    command = vllm_command(target, heads[0], flags=arguments.flags, program=program, **length)
    if arguments.dry_run:
        print(json.dumps(command) if arguments.json else shlex.join(command))
        return 0
    logger.info("%s", shlex.join(command))
    launch(command)
    return 0  # not reached: the server has replaced this process
