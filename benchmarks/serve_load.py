"""Load on a running server: throughput and latency by number of clients, or a soak with cancels and bad requests.

    aquiline serve --port 8000 &
    python -m benchmarks.serve_load --url http://127.0.0.1:8000 --clients 1 4 8 16 --output load.json
    python -m benchmarks.serve_load --url http://127.0.0.1:8000 --soak --minutes 15 --pid PID

The same command measures any other server with OpenAI's API (`vllm serve`), so that two can be compared.
A soak needs our own server: it reads its metrics, and compares every finished answer with the first one to the
same question. Where the kernels do not run (`aquiline doctor`), start the server with `--dtype float32`: elsewhere
bfloat16 rounds by the width of a forward.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parent.parent


@dataclass
class Answer:
    """The result of one request.

    Attributes:
        text: of the answer.
        arrivals: seconds from the request to each event with text.
        tokens: completion tokens, as the server counts them; 0 if it did not say.
        status: HTTP status; 0 for a connection that broke.
        whole: it came to its end.
    """

    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    status: int = 0
    whole: bool = False


def ask(url: str, model: str, messages: list[dict[str, str]], tokens: int, *, leave: int | None = None) -> Answer:
    """Streams one answer; `leave` closes the connection after that many events."""
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
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
    return found


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def prompts() -> list[str]:
    """Questions of everyday kinds from the package."""
    lines = (ROOT / "src/aquiline/bench/prompts/mt_bench.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [each["turns"][0] if "turns" in each else str(each.get("question") or each.get("prompt")) for each in found]


def load(url: str, model: str, clients: int, requests: int, tokens: int) -> dict[str, Any]:
    """Lets `clients` ask `requests` questions each, one after the other."""
    questions, found = prompts(), list[Answer]()

    def work(number: int) -> None:
        for i in range(requests):
            question = questions[(number * requests + i) % len(questions)]
            found.append(ask(url, model, [{"role": "user", "content": question}], tokens))

    seconds = _together(clients, work)
    gaps = [b - a for each in found for a, b in zip(each.arrivals, each.arrivals[1:], strict=False)]
    # A step emits several tokens at once: a reader sees the gap between pieces.
    return {
        "clients": clients,
        "requests": len(found),
        "failed": sum(not each.whole for each in found),
        "tokens_per_second": sum(each.tokens for each in found) / seconds,
        "first_token_p50": _share([each.arrivals[0] for each in found if each.arrivals], 0.5),
        "first_token_p95": _share([each.arrivals[0] for each in found if each.arrivals], 0.95),
        "between_pieces_p50": _share(gaps, 0.5),
        "between_pieces_p95": _share(gaps, 0.95),
    }


def _together(clients: int, work: Any) -> float:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def _share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


# -- soak ------------------------------------------------------------------------------------------

WRONG: tuple[bytes, ...] = (
    b"{",
    b"[]",
    b'{"messages": 3}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 9}',
    b'{"messages": [{"role": "user", "content": "x"}], "unknown": 1}',
)


@dataclass(eq=False)
class _Soak:
    """The state that the clients of a soak share."""

    url: str
    model: str
    end: float
    questions: list[str] = field(default_factory=prompts)
    first: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"finished": 0, "left": 0, "refused": 0})
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, question: str) -> None:
        """Asks a question, whose answer must equal the first one to it."""
        answer = ask(self.url, self.model, [{"role": "user", "content": question}], 48)
        with self.lock:
            self.counts["finished"] += 1
            if not answer.whole or answer.text != self.first.setdefault(question, answer.text):
                self.wrong.append(f"{question[:40]!r}: {answer.text[:60]!r}, status {answer.status}")

    def work(self, number: int) -> None:
        """Runs one client until the end."""
        rng = random.Random(number)
        while time.monotonic() < self.end:
            question, kind = rng.choice(self.questions), rng.random()
            if kind < 1 / 3:
                ask(self.url, self.model, [{"role": "user", "content": question}], 64, leave=rng.randrange(12))
                with self.lock:
                    self.counts["left"] += 1
            elif kind < 0.45:
                status = _post(self.url, rng.choice(WRONG))
                with self.lock:
                    self.counts["refused"] += 1
                    if status != 400:
                        self.wrong.append(f"a malformed body got status {status}")
            else:
                self.check(question)


def soak(url: str, model: str, minutes: float, clients: int, pid: int | None) -> dict[str, Any]:
    """Runs clients, a third of whose requests leave at a random point, with malformed ones in between.

    Raises:
        SystemExit: if a slot leaks, memory grows, an answer differs, or a malformed body is not refused.
    """
    state, memory = _Soak(url, model, time.monotonic() + 60 * minutes), list[int]()

    def watch() -> None:
        while time.monotonic() < state.end and pid is not None:
            memory.append(_resident(pid))
            time.sleep(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _together(clients, state.work)
    watcher.join()
    for question in list(state.first):  # answers must equal those of a quiet server too
        state.check(question)
    left, growth = _running(url), _growth(memory)
    result = {
        "minutes": minutes,
        "clients": clients,
        **state.counts,
        "running_at_the_end": left,
        "memory_growth": growth,
    }
    print(json.dumps(result | {"resident_mb": [memory[0] >> 20, memory[-1] >> 20] if memory else None}, indent=1))
    if state.wrong or left or (growth is not None and growth > 0.02):
        raise SystemExit(f"the soak failed: {state.wrong[:5]}, {left} requests left, memory growth {growth}")
    return result


def _growth(memory: list[int]) -> float | None:
    """Compares the last eighth of a soak with the eighth after its middle; None without samples."""
    half = len(memory) // 2
    part = max(1, half // 4)
    return median(memory[-part:]) / median(memory[half : half + part]) - 1 if half else None


def _post(url: str, body: bytes) -> int:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def _running(url: str) -> float:
    """Requests that the server still holds once it has had time to notice the last ones leave."""
    place, total = urlsplit(url), 0.0
    for _ in range(50):
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        total = sum(float(line.split()[-1]) for line in lines if line.startswith(names))
        if total == 0:
            break
        time.sleep(0.2)
    return total


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=4, help="per client (default: 4)")
    parser.add_argument("--tokens", type=int, default=128, help="per answer (default: 128)")
    parser.add_argument("--soak", action="store_true", help="with cancels and malformed requests, checked")
    parser.add_argument("--minutes", type=float, default=15, help="of a soak (default: 15)")
    parser.add_argument("--pid", type=int, help="the server's process, to watch its memory (Linux)")
    parser.add_argument("--output", type=Path, help="file for the result, as JSON")
    arguments = parser.parse_args()
    if arguments.soak:
        clients = arguments.clients[0] if len(arguments.clients) == 1 else 8
        result: Any = soak(arguments.url, arguments.model, arguments.minutes, clients, arguments.pid)
    else:
        result = []
        for clients in arguments.clients:
            load(arguments.url, arguments.model, clients, 1, 16)  # warms up
            result.append(load(arguments.url, arguments.model, clients, arguments.requests, arguments.tokens))
            print(json.dumps(result[-1]), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
