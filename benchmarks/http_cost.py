"""What HTTP costs: tokens streamed through the server, over tokens from `stream()` in process, at one client.

    python -m benchmarks.http_cost --output benchmarks/results/http-cost.json

Server and `stream()` share one engine, and take turns at the same questions. The client is a process of its own on the
same machine, as light as Python allows; what it costs is part of the ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import aquiline
from aquiline.serve.guard import ServerSettings
from aquiline.serve.run import bind, http_server
from aquiline.serve.server import Server
from benchmarks.serve_load import Answer, Messages, ask, conversation, machine


def compare(model: Any, ask_server: Any, pairs: int, tokens: int) -> dict[str, Any]:
    """Streams each question both ways, in turn; returns medians, and the ratio of every pair."""

    def within(messages: Messages) -> float:
        began = time.perf_counter()
        events = model.stream(messages, max_new_tokens=tokens, temperature=0)
        count = sum(len(event.token_ids) for event in events)
        return (time.perf_counter() - began) / count

    def over(messages: Messages) -> float:
        answer, busy = ask_server(messages)
        client.append(busy / answer.tokens)
        return float(answer.seconds / answer.tokens)

    runs, client = [], list[float]()
    for number in range(-1, pairs):  # the first pair warms up
        messages = conversation(number + 100)
        ways = (within, over) if number % 2 else (over, within)
        found = {way: way(messages) for way in ways}
        if number >= 0:
            runs.append((found[within], found[over]))
    ratios = [b / a for a, b in runs]
    return {
        "stream_ms_per_token": 1000 * median(a for a, _ in runs),
        "http_ms_per_token": 1000 * median(b for _, b in runs),
        "client_cpu_ms_per_token": 1000 * median(client),
        "http_over_stream": median(ratios),
        "ratios": ratios,
    }


def timed(*words: Any, **fields: Any) -> tuple[Answer, float]:
    """Asks; returns the answer and the CPU seconds that this client took for it."""
    began = time.process_time()
    return ask(*words, **fields), time.process_time() - began


@contextmanager
def served(loaded: Any) -> Iterator[str]:
    """Serves a model from a thread of this process; yields the URL."""
    endpoints = Server(ServerSettings(port=0, served_model_name="smollm2"))
    endpoints.ready(loaded)
    listener, server = bind(endpoints.settings), http_server(endpoints)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        endpoints.close()


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=16, help="questions of each kind (default: 16)")
    parser.add_argument("--tokens", type=int, default=128, help="per answer (default: 128)")
    parser.add_argument("--output", type=Path, help="file for the result, as JSON")
    options = parser.parse_args()
    loaded, result = aquiline.load("smollm2"), machine()
    result["installed"] = [name for name in ("httptools", "uvloop") if find_spec(name)]
    kinds: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("auto", loaded, {}),
        ("plain", loaded.plain(), {"speculation": {"draft": "none"}}),
    )
    with served(loaded) as url, multiprocessing.get_context("spawn").Pool(1) as client:
        for name, model, more in kinds:

            def ask_server(messages: Messages, more: dict[str, Any] = more) -> Any:
                return client.apply(timed, (url, "smollm2", messages, options.tokens), more)

            result[name] = compare(model, ask_server, options.pairs, options.tokens)
            print(name, json.dumps(result[name]), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
