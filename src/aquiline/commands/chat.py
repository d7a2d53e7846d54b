"""aquiline chat: chats with a model in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from aquiline.commands.common import add_model_options, add_sampling_options, load_model, output_record, params_of

if TYPE_CHECKING:
    from aquiline.engine.chat import ChatSession
    from aquiline.sampling import SamplingParams


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object per answer")
    add_model_options(parser)
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command: each line of standard input is a turn; an empty line or Ctrl-D ends the chat."""
    loaded = load_model(arguments)
    params = params_of(arguments, loaded)
    session = loaded.chat(system=arguments.system)
    interactive = sys.stdin.isatty()
    if interactive and not arguments.quiet:
        print("an empty line or Ctrl-D ends the chat; Ctrl-C stops an answer", file=sys.stderr)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            break
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input cannot be read ({error}); give UTF-8 text") from error
        if not line:
            break
        try:
            _answer(session, line, params, arguments.json)
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)
        except ValueError as error:
            if not interactive:
                raise
            print(f"error: {error}", file=sys.stderr)  # keep the conversation so far
    return 0


def _answer(session: ChatSession, line: str, params: SamplingParams, as_json: bool) -> None:
    # Close even if Ctrl-C arrives between two events, so that the session is free for the next turn.
    with closing(session.stream(line, params)) as events:
        for event in events:
            if not as_json:
                print(event.text, end="", flush=True)
            elif event.output is not None:
                # Flush: a client on a pipe waits for the answer before it sends the next turn.
                print(json.dumps(output_record(line, event.output), ensure_ascii=False), flush=True)
    if not as_json:
        print(flush=True)
