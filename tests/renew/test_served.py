"""`aquiline serve --renew`: what a server keeps and shows, and a whole renewal in its processes, with kills."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.drafters.eagle_network import DraftHead
from aquiline.drafters.trees import Chain
from aquiline.loading import load
from aquiline.models.files import write_text
from aquiline.renew import renewal as module
from aquiline.renew.renewal import accompany
from aquiline.renew.settings import open_renewal
from aquiline.renew.slices import NICENESS
from aquiline.renew.store import read_store
from aquiline.renew.versions import add_version, current, events, serve_version
from tests import tiny
from tests.command_line import call, write_eagle, write_target
from tests.serve.serving import serving, user
from tests.tiny_tokenizers import every_byte
from tests.training.tiny_training import write_set

CHAT = "/v1/chat/completions"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


TRAIN = {
    "max_length": 64, "batch_positions": 256, "micro_positions": 256, "total_positions": 4000, "warmup_positions": 256,
    "ttt_steps": 2, "dtype": "float32", "save_minutes": 0.0, "lr": 3e-3, "muon_lr": 0.02,
}  # fmt: skip

SERVER = """
from aquiline.renew import renewal
renewal.QUIET, renewal.RECHECK, renewal.LEAST_TOKENS = 0.5, 0.5, 1000
from aquiline.cli import main
raise SystemExit(main())
"""
"""`aquiline`, with a renewal that starts after seconds and few conversations."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, two heads for it, and a set of original conversations."""
    folder = tmp_path_factory.mktemp("served")
    target = write_target(folder / "target", eos_token_id=None)
    write_eagle(folder / "head", "eagle3", target)
    write_eagle(folder / "other", "eagle3", target, seed=1)
    write_set(folder / "set", 4, 12)
    return folder


@pytest.fixture
def learnable(base: Path, tmp_path: Path) -> Path:
    """A target whose next token is nearly a function of the last one, and a head that knows nothing of it yet."""
    folder = shutil.copytree(base / "target", tmp_path / "learnable")
    tensors = load_file(folder / "model.safetensors")
    weak = {name: t * 0.1 if "layers." in name and t.dim() > 1 else t for name, t in tensors.items()}
    save_file(weak, folder / "model.safetensors", metadata={"format": "pt"})
    size = len(every_byte())
    network = tiny.head("eagle3", vocab_size=size, draft_vocab_size=size, dtype=torch.float32).network
    write_head(tmp_path / "untrained", DraftHead(network, torch.arange(size)), torch.float32)
    return folder


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What a condition gives as soon as it is true; time in which a busy machine stops this process does not count."""
    for _ in range(int(50 * seconds)):
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come about in time")


def state(process: int) -> str:
    """A process in the words of the kernel: R, S, T (stopped); empty if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0].replace("Z", "")
    except OSError:
        return ""


def test_a_server_keeps_what_it_may_pauses_training_and_follows_a_rollback(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "QUIET", 1.0)
    code = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1] + '/pid', 'w'), flush=True); time.sleep(60)"
    monkeypatch.setattr(module, "STAGE", (sys.executable, "-c", code))
    folder = tmp_path / "renewal"
    loaded = load(base / "target", base / "head", tree=Chain(3), dtype="float32")
    with serving(loaded, partial(accompany, folder, (str(base / "set"),), "float32")) as running:

        def health() -> Any:
            return running.ask("/health")[2]["renewal"]

        def ask(**more: Any) -> str:
            body = {"messages": user("Hello"), "max_tokens": 20, "ignore_eos": True, "temperature": 0} | more
            return str(running.ask(CHAT, body)[2]["choices"][0]["message"]["content"])

        before = ask()
        ask(messages=user("Private"), store=False)
        ask(messages=user("Two"), n=2, temperature=1.0)
        assert len(read_store(folder / "conversations")) == 3
        (folder / "training").mkdir()
        pid = int(until(lambda: (folder / "pid").exists() and (folder / "pid").read_text()))
        assert until(lambda: health()["training"] == "running")
        ask(max_tokens=400)
        assert state(pid) == "T" and health()["training"] == "paused"
        until(lambda: state(pid) in "RS")
        serve_version(folder, add_version(folder, base / "other", 0).number, "swap")
        until(lambda: health()["version"] == 1)
        assert 'aquiline:head_version{model_name="tiny"} 1.0' in running.ask("/metrics")[2]
        assert ask() == before, "no head changes an output"
        assert call(capsys, "renew", folder, "--rollback").out == "version 0 is served\n"
        until(lambda: health()["version"] == 0)
    assert state(pid) == "", "the server ends its training"


@dataclass(frozen=True, eq=False)
class Process:
    """`aquiline serve --renew` in a process of its own."""

    process: subprocess.Popen[str]
    port: int

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=200)
        raw = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, raw, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())

    def text(self, question: str, tokens: int = 24) -> str:
        body = {"messages": user(question), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return str(self.ask(CHAT, body)["choices"][0]["message"]["content"])

    def renewal(self) -> Any:
        return self.ask("/health")["renewal"]

    def trainer(self) -> int:
        """The training process, or 0."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        return next((child for child in found if state(child)), 0)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def served(target: Path, folder: Path, *words: str) -> Iterator[Process]:
    """A server that is ready; killed at the end."""
    options = ["serve", "--target", str(target), "--port", "0", "--dtype", "float32", "--tree", "chain:3"]
    command = [sys.executable, "-c", SERVER, *options, "--renew", str(folder), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready: http://127.0.0.1:"), line
        yield Process(process, int(line.split(":")[3].split()[0]))
    finally:
        process.kill()
        process.wait()


def status(folder: Path, *words: str) -> Any:
    """`aquiline renew --json` in a process of its own."""
    command = [sys.executable, "-m", "aquiline.cli", "renew", str(folder), "--json", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


@pytest.mark.verify
@pytest.mark.timeout(2400)  # a busy machine leaves the training a tenth of a core
def test_a_server_renews_its_head_and_survives_kills(base: Path, learnable: Path, tmp_path: Path) -> None:
    folder, head = tmp_path / "renewal", learnable.parent / "untrained"
    made = {"data": (str(base / "set"),), "depth": 3, "dtype": "float32"}
    open_renewal(folder, learnable, head, made)
    settings = json.loads((folder / "settings.json").read_text()) | {"train": TRAIN}
    write_text(folder / "settings.json", json.dumps(settings))
    words = ("--draft", str(head))
    questions = [f"{letter}{'!' * count}" for count in range(7) for letter in "abcdefghij"]
    with served(learnable, folder, *words) as server:
        before = [server.text(question) for question in questions]
        assert server.renewal()["version"] == 0
        until(lambda: (folder / "training" / "run" / "checkpoint.pt").exists(), 900)
        trainer = until(server.trainer)
        assert os.getpriority(os.PRIO_PROCESS, trainer) >= NICENESS
        server.text("How are you?", 300)
        assert state(trainer) == "T", "a request stops it"
        until(lambda: state(trainer) in "RS")
        server.kill()
        until(lambda: not state(trainer))
    found = status(folder)
    assert found["current"] == 0 and found["training"] and found["store"]["conversations"] == 71
    with served(learnable, folder, *words) as server:
        until(lambda: server.renewal()["version"] == 1, 900)
        assert [server.text(question) for question in questions] == before, "no head changes an output"
        until(lambda: server.renewal()["training"] == "idle")
        server.kill()
    (swap,) = (event for event in status(folder)["events"] if event["event"] == "swap")
    assert swap["version"] == 1 and swap["reason"].startswith("better: +")
    log = (folder / "training-log.txt").read_text()
    assert log.count("holds no checkpoint to resume") == 1, "the second server resumed the run"
    with served(learnable, folder, *words) as server:
        assert server.renewal()["version"] == 1, "a start serves the renewed head"
        assert server.text(questions[0]) == before[0]
        assert status(folder, "--rollback") == {"version": 0}
        until(lambda: server.renewal()["version"] == 0)
        (folder / "training").mkdir()
        os.kill(until(server.trainer), signal.SIGKILL)
        until(lambda: events(folder)[-1]["event"] == "failure")
        assert server.text(questions[0]) == before[0] and server.renewal()["version"] == 0
    served_head = current(folder)
    assert served_head is not None and served_head.number == 0
    assert load(learnable, served_head.folder, dtype="float32").head is not None
