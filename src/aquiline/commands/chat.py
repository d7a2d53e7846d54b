"""aquiline chat: chats with a model in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from aquiline.commands.common import (
    MODEL_OPTIONS,
    add_model_options,
    add_sampling_options,
    given_settings,
    load_model,
    output_record,
    params_of,
    refuse_given,
)
from aquiline.commands.prompts import add_template_options, template_arguments

if TYPE_CHECKING:
    from aquiline.engine.chat import ChatSession
    from aquiline.sampling import SamplingParams
    from aquiline.serve.client import RemoteChat

_LOCAL = {"target": "smollm2", "draft": "auto", "n": None, **MODEL_OPTIONS}
"""Options without effect on a server's model → default."""

_REMOTE = {"model": None, "api_key": None}
"""Options without effect unless a server answers → default."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object per answer")
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="talk to a server with OpenAI's API instead of loading a model")
    server.add_argument("--model", metavar="NAME", help="with --url: the model (default: the first that it lists)")
    server.add_argument("--api-key", help="with --url: the server's key (default: AQUILINE_API_KEY, else none)")
    add_template_options(parser)
    add_model_options(parser)
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command: each line of standard input is a turn; an empty line or Ctrl-D ends the chat."""
    answer = _answer_of(arguments)
    interactive = sys.stdin.isatty()
    if interactive and not arguments.quiet:
        print("an empty line or Ctrl-D ends the chat; Ctrl-C stops an answer", file=sys.stderr)
    while True:
        try:
            line = input("> " if interactive else "").removeprefix("\ufeff").strip()
        except EOFError:
            break
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input cannot be read ({error}); give UTF-8 text") from error
        if not line:
            break
        try:
            answer(line)
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)
        except (ValueError, RuntimeError) as error:
            if not interactive or (isinstance(error, RuntimeError) and not arguments.url):
                raise
            print(f"error: {error}", file=sys.stderr)  # keep the conversation so far
    return 0


def _answer_of(arguments: argparse.Namespace) -> Callable[[str], None]:
    """Returns a function that prints the answer to a turn, from a local model or a server."""
    if arguments.url is None:
        refuse_given(arguments, _REMOTE, "a model of this process", "add --url")
        template = template_arguments(arguments)
        loaded = load_model(arguments)
        params = params_of(arguments, loaded)
        session = loaded.chat(system=arguments.system, **template)
        return lambda line: _answer(session, line, params, arguments.json)
    from aquiline.sampling import SamplingParams
    from aquiline.serve.client import RemoteChat

    refuse_given(arguments, _LOCAL, "--url", "give it to the server")
    settings = given_settings(arguments, SamplingParams)
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}  # as OpenAI and vLLM call them
    sent = {names.get(name, name): list(v) if isinstance(v, tuple) else v for name, v in settings.items()}
    sent |= {name: value for name, value in template_arguments(arguments).items() if value is not None}
    key = arguments.api_key or os.environ.get("AQUILINE_API_KEY")
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    remote = RemoteChat(arguments.url, arguments.model, key, sent, system)
    return lambda line: _answer_remotely(remote, line, arguments.json)


def _answer_remotely(chat: RemoteChat, line: str, as_json: bool) -> None:
    pieces: list[str] = []
    with closing(chat.stream(line)) as stream:
        for piece in stream:
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
    record = {"prompt": line, "text": "".join(pieces), "finish_reason": chat.finish_reason}
    print(json.dumps(record, ensure_ascii=False) if as_json else "", flush=True)


def _answer(session: ChatSession, line: str, params: SamplingParams, as_json: bool) -> None:
    # Close even if Ctrl-C arrives between two events, so that the session is free for the next turn.
    with closing(session.stream(line, params)) as events:
        for event in events:
            if not as_json:
                print(event.text, end="", flush=True)
            elif event.output is not None:
                # Flushed, because a client on a pipe waits for the answer before it sends the next turn.
                print(json.dumps(output_record(line, event.output, params), ensure_ascii=False), flush=True)
    if not as_json:
        print(flush=True)
