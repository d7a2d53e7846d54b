"""Soaks a running server of ours: many clients, a third of whom leave at random points, and malformed requests between.

    aquiline serve --port 8000 &
    python -m benchmarks.serve_soak --url http://127.0.0.1:8000 --minutes 15 --pid PID

The soak reads the server's metrics, and compares every finished answer with the first one to the same question. Where
the kernels do not run (`aquiline doctor`), start the server with `--dtype float32`: elsewhere bfloat16 rounds by the
width of a forward.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serve_load import ask, prompts, together

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
    together(clients, state.work)
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
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--pid", type=int, help="the server's process, to watch its memory (Linux)")
    parser.add_argument("--output", type=Path, help="file for the result, as JSON")
    arguments = parser.parse_args()
    result = soak(arguments.url, arguments.model, arguments.minutes, arguments.clients, arguments.pid)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
