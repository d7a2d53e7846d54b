"""Load on running servers: throughput and latency by number of clients.

    aquiline serve --port 8000 &
    python -m benchmarks.serve_load --servers aquiline=http://127.0.0.1:8000 --clients 1 4 8 16 --output load.json

Several servers (`--servers aquiline=URL,PID vllm=URL,PID`) take turns at the same questions. A server with a PID is
stopped, with the processes that it started, while another one answers. An existing output keeps the runs of other
numbers of clients. Every request begins with a text of its own: no server profits from the keys and values of others.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from aquiline.bench.environment import cpu_name

ROOT = Path(__file__).parent.parent

Messages = Sequence[dict[str, str]]


@dataclass
class Answer:
    """The result of one request.

    Attributes:
        text: of the answer.
        arrivals: seconds from the request to each event with text.
        seconds: from the request to the end of the answer.
        tokens: completion tokens, as the server counts them; 0 if it did not say.
        status: HTTP status; 0 for a connection that broke.
        whole: it came to its end.
    """

    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    status: int = 0
    whole: bool = False


def ask(url: str, model: str, messages: Messages, tokens: int, *, leave: int | None = None, **more: Any) -> Answer:
    """Streams one answer; `leave` closes the connection after that many events, `more` are fields of the body."""
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True, **more}
    body["stream_options"] = {"include_usage": True}
    found, began = Answer(), time.perf_counter()
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=600)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        found.status = response.status
        for event in _events(response):
            piece = (event.get("choices") or [{}])[0].get("delta", {}).get("content")
            if piece:
                found.text += piece
                found.arrivals.append(time.perf_counter() - began)
            if event.get("usage"):
                found.tokens, found.whole = event["usage"]["completion_tokens"], True
            if leave is not None and len(found.arrivals) >= leave:
                break
    finally:
        connection.close()
    found.seconds = time.perf_counter() - began
    return found


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    rest = b""
    while piece := response.read1():  # reading by lines takes several times as long
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                yield json.loads(event[6:])


def prompts() -> list[str]:
    """Questions of everyday kinds from the package."""
    found = []
    for name in ("mt_bench", "alpaca", "qa", "gsm8k"):
        lines = (ROOT / f"src/aquiline/bench/prompts/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        found += [json.loads(line) for line in lines]
    return [each["turns"][0] if "turns" in each else str(each.get("question") or each.get("prompt")) for each in found]


def conversation(number: int) -> Messages:
    """The `number`-th question, behind a system message that no other number has."""
    questions = prompts()
    system = {"role": "system", "content": f"{number} is the number of this conversation."}
    return [system, {"role": "user", "content": questions[number % len(questions)]}]


def machine() -> dict[str, Any]:
    """The machine and the time of a measurement."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d %H:%M")}


def together(clients: int, work: Callable[[int], None]) -> float:
    """Runs the clients' work in threads; returns the seconds until the last has ended."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


# -- load ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A running server; `processes` are stopped while another one answers."""

    name: str
    url: str
    processes: tuple[int, ...]


def read_server(text: str) -> Server:
    """Reads NAME=URL or NAME=URL,PID."""
    name, _, rest = text.partition("=")
    url, _, pid = rest.partition(",")
    if not url:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: NAME=URL or NAME=URL,PID")
    return Server(name, url, tuple(_family(int(pid))) if pid else ())


def _family(pid: int) -> list[int]:
    """The process and all that descend from it (Linux)."""
    children = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    return [pid, *(each for child in children for each in _family(child))]


@contextmanager
def alone(server: Server, servers: Sequence[Server]) -> Iterator[None]:
    """Stops the other servers."""
    others = [pid for other in servers if other is not server for pid in other.processes]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def load(url: str, model: str, clients: int, requests: int, tokens: int, first: int = 0) -> dict[str, Any]:
    """Lets `clients` ask `requests` questions each, one after the other; `first` numbers the first question."""
    found = list[Answer]()

    def work(client: int) -> None:
        for i in range(requests):
            found.append(ask(url, model, conversation(first + client * requests + i), tokens))

    seconds = together(clients, work)
    gaps = [b - a for each in found for a, b in zip(each.arrivals, each.arrivals[1:], strict=False)]
    # A step emits several tokens at once: a reader sees the gap between pieces.
    return {
        "requests": len(found),
        "failed": sum(not each.whole for each in found),
        "tokens_per_second": sum(each.tokens for each in found) / seconds,
        "first_token_p50": _share([each.arrivals[0] for each in found if each.arrivals], 0.5),
        "first_token_p95": _share([each.arrivals[0] for each in found if each.arrivals], 0.95),
        "between_pieces_p50": _share(gaps, 0.5),
        "between_pieces_p95": _share(gaps, 0.95),
    }


def _share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def side_by_side(servers: Sequence[Server], options: argparse.Namespace, clients: int) -> dict[str, Any]:
    """Loads the servers by turns, in `options.rounds` rounds; returns medians and every round."""
    rounds: dict[str, list[Any]] = {server.name: [] for server in servers}
    for number in range(options.rounds):
        first = 1000 * (number + 1)
        for server in servers if number % 2 else reversed(servers):
            with alone(server, servers):
                load(server.url, options.model, clients, 1, 8, first + 500)  # warms up
                found = load(server.url, options.model, clients, options.requests, options.tokens, first)
            rounds[server.name].append(found)
            print(json.dumps({"clients": clients, "server": server.name, **found}), flush=True)
    medians = {
        name: {key: median(each[key] for each in found) for key in found[0]} for name, found in rounds.items() if found
    }
    reference = rounds[servers[-1].name]
    ratios = {
        name: median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(found, reference, strict=True))
        for name, found in rounds.items()
    }
    return {"clients": clients, "tokens_per_second_over_last": ratios, "medians": medians, "rounds": rounds}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=read_server, nargs="+", metavar="NAME=URL[,PID]", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2, help="per client and round (default: 2)")
    parser.add_argument("--tokens", type=int, default=128, help="per answer (default: 128)")
    parser.add_argument("--output", type=Path, help="file for the result, as JSON")
    options = parser.parse_args()
    result = machine() | {"runs": _kept(options.output, options.clients)}
    for clients in options.clients:
        result["runs"].append(side_by_side(options.servers, options, clients))
    result["runs"].sort(key=lambda run: run["clients"])
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _kept(output: Path | None, clients: Sequence[int]) -> list[Any]:
    """The runs of other numbers of clients in an existing file."""
    if output is None or not output.exists():
        return []
    return [run for run in json.loads(output.read_text(encoding="utf-8"))["runs"] if run["clients"] not in clients]


if __name__ == "__main__":
    main()
