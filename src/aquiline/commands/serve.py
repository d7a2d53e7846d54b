"""aquiline serve: serves a target over OpenAI's API, or starts vLLM with its head."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
from pathlib import PurePath
from typing import TYPE_CHECKING

from aquiline.commands.common import (
    MODEL_OPTIONS,
    add_model_options,
    add_setting_options,
    given_settings,
    load_model,
    refuse_given,
    warn_lossy,
)

if TYPE_CHECKING:
    from aquiline.loading import Loaded
    from aquiline.serve.server import Accompany

logger = logging.getLogger("aquiline")

_SERVER = ("host", "port", "api_key", "cors", "max_queue", "timeout", "served_model_name")

_OWN = {**dict.fromkeys(_SERVER), "renew": None, "renew_data": None, **MODEL_OPTIONS}
"""Options of our own server → default; vLLM takes its own flags after --."""

_VLLM: dict[str, object] = {"draft_tokens": None, "dry_run": False, "json": False, "flags": []}
"""Options of --engine vllm → default."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from aquiline.serve.guard import ServerSettings

    parser.add_argument(
        "--engine", default="aquiline", choices=("aquiline", "vllm"), help="the server to start (default: aquiline)"
    )
    add_setting_options(parser.add_argument_group("server"), ServerSettings, _SERVER)
    renewal = parser.add_argument_group("renewal")
    renewal.add_argument(
        "--renew", metavar="FOLDER", help="keep served conversations there, and renew the head from them while idle"
    )
    renewal.add_argument(
        "--renew-data", nargs="+", metavar="SET", help="training sets of the head's original data, for the first start"
    )
    add_model_options(parser)
    vllm = parser.add_argument_group("--engine vllm")
    vllm.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags for vLLM's server")
    vllm.add_argument("--draft-tokens", type=int, metavar="N", help="length of the draft chains (≥ 1; default: 3)")
    vllm.add_argument(
        "--dry-run", action="store_true", help="run all checks, then print the command instead of starting it"
    )
    vllm.add_argument("--json", action="store_true", help="with --dry-run: print the command as a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command: our own server until it is told to stop; vLLM in place of this process."""
    own = arguments.engine == "aquiline"
    if own and arguments.flags:  # `vllm serve MODEL` takes the model so
        raise ValueError(
            f"{arguments.flags[0]!r} is not an option; name the model with --target; flags need --engine vllm"
        )
    remedy = "add --engine vllm" if own else "drop it, or give vLLM its own flags after --"
    refuse_given(arguments, _VLLM if own else _OWN, f"--engine {arguments.engine}", remedy)
    return _serve(arguments) if own else _serve_vllm(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    import os

    from aquiline.serve.guard import ServerSettings
    from aquiline.serve.run import run_server

    # A folder's name is enough: its path is private.
    given = {
        "served_model_name": PurePath(arguments.target).name,
        "api_key": os.environ.get("AQUILINE_API_KEY") or None,
    }
    settings = ServerSettings(**(given | given_settings(arguments, ServerSettings)))
    if settings.api_key is None and settings.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("anyone who reaches %s may use this server; set --api-key", settings.host)

    def ready(url: str, loaded: Loaded) -> None:
        warn_lossy(loaded.engine.lossy)
        print(f"ready: {url} (model {settings.served_model_name}, drafting: {loaded.draft_name})", flush=True)

    run_server(settings, lambda: load_model(arguments), ready, _renewal(arguments))
    return 0


def _renewal(arguments: argparse.Namespace) -> Accompany | None:
    """Makes what --renew asks for.

    Raises:
        ValueError: for --renew-data alone, and for an empty name.
    """
    if arguments.renew is None:
        if arguments.renew_data:
            raise ValueError("--renew-data has no effect without --renew; add --renew FOLDER")
        return None
    if not arguments.renew:
        raise ValueError("--renew is ''; allowed: a folder, which is made if missing")
    from functools import partial

    from aquiline.models.files import user_path
    from aquiline.renew.renewal import accompany

    return partial(accompany, user_path(arguments.renew), tuple(arguments.renew_data or ()), arguments.dtype)


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
