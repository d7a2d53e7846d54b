"""Regeneration: right histories, nothing twice, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aquiline.models.files import locked
from aquiline.training.data.conversations import Conversation, read_conversations
from aquiline.training.data.endpoint import Endpoint, EndpointError
from aquiline.training.data.record_log import RecordLog
from aquiline.training.data.regenerate import EMPTY_REPLY, REJECTED, TWICE, regenerate
from aquiline.training.data.replies import Reply, ReplyRequest, ReplySampling
from tests.training.chat_server import ChatServer, says


def talks(path: Path, count: int, turns: int = 1, system: str | None = None) -> Path:
    """``count`` conversations of ``turns`` exchanges, whose answers must not survive."""
    with path.open("w") as stream:
        for i in range(count):
            messages = [{"role": "system", "content": system}] if system else []
            for t in range(turns):
                messages.append({"role": "user", "content": f"question {i}.{t}"})
                messages.append({"role": "assistant", "content": "somebody else's words"})
            stream.write(json.dumps({"messages": messages}) + "\n")
    return path


class Echo:
    """A local target: repeats the last question and says how long the history is."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[ReplyRequest], ReplySampling]] = []

    def __call__(self, requests: Sequence[ReplyRequest], sampling: ReplySampling) -> list[Reply]:
        self.batches.append((list(requests), sampling))
        return [self.reply(request) for request in requests]

    def reply(self, request: ReplyRequest) -> Reply:
        return Reply(f"{request.messages[-1].content} after {len(request.messages) - 1}")

    @property
    def requests(self) -> list[ReplyRequest]:
        return [request for requests, _ in self.batches for request in requests]


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def said(record: dict[str, Any]) -> list[str]:
    return [message["content"] for message in record["messages"]]


def test_each_turn_is_answered_given_the_new_history(tmp_path: Path) -> None:
    source, output, echo = talks(tmp_path / "in", 3, 2, "Be kind."), tmp_path / "out", Echo()
    report = regenerate(source, output, echo, batch_size=2)
    assert (report.written, report.replies, report.already) == (3, 6, 0)
    assert {tuple(said(record)) for record in records(output)} == {
        (
            "Be kind.",
            f"question {i}.0",
            f"question {i}.0 after 1",
            f"question {i}.1",
            f"question {i}.1 after 3",
        )
        for i in range(3)
    }
    second = next(request for request in echo.requests if len(request.messages) == 4)
    assert [m.role for m in second.messages] == ["system", "user", "assistant", "user"]
    assert second.messages[2].content.endswith("after 1")
    assert [len(requests) for requests, _ in echo.batches] == [2, 2, 1, 1]
    assert all(isinstance(item, Conversation) and item.finished for item in read_conversations(output))


QUESTIONS: dict[str, tuple[Any, list[str]]] = {
    "messages": ({"messages": [{"role": "user", "content": "why"}]}, ["why", "why after 0"]),
    "a list": ([{"role": "user", "content": "why"}], ["why", "why after 0"]),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "why"}]}, ["why", "why after 0"]),
    "a prompt": ({"prompt": "why"}, ["why", "why after 0"]),
    "an empty completion": ({"prompt": "why", "completion": ""}, ["why", "why after 0"]),
    "an instruction": ({"instruction": "why", "input": "this"}, ["why\n\nthis", "why\n\nthis after 0"]),
    "a system turn": ({"system": "Be brief.", "prompt": "why"}, ["Be brief.", "why", "why after 1"]),
    "a prompt of messages": (
        {"prompt": [{"role": r, "content": t} for r, t in (("user", "a"), ("assistant", "b"), ("user", "c"))]},
        ["a", "a after 0", "c", "c after 2"],
    ),
}


@pytest.mark.parametrize("case", QUESTIONS)
def test_questions_without_an_answer_are_answered(case: str, tmp_path: Path) -> None:
    record, expected = QUESTIONS[case]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(record) + "\n")
    report = regenerate(source, output, Echo())
    assert (report.written, report.refused) == (1, {})
    assert said(records(output)[0]) == expected
    [item] = read_conversations(output)
    assert isinstance(item, Conversation) and item.messages[-1].role == "assistant"


def test_a_record_without_a_question_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    empty = [{"messages": []}, {"system": "Be brief.", "messages": []}, {"prompt": " "}, {"prompt": None}]
    source.write_text("".join(json.dumps(record) + "\n" for record in empty))
    report = regenerate(source, tmp_path / "out.jsonl", Echo())
    assert (report.written, report.refused) == (0, {"no conversation": 3, "empty turn": 1})


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    source, output = talks(tmp_path / "in", 3), tmp_path / "out"
    with locked(output), pytest.raises(ValueError, match=rf"another process .pid {os.getpid()}"):
        regenerate(source, output, Echo())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"], "nothing was written"


def test_a_second_run_does_nothing_and_a_longer_one_only_the_rest(tmp_path: Path) -> None:
    source, output, echo = talks(tmp_path / "in", 6), tmp_path / "out", Echo()
    regenerate(source, output, echo, limit=4)
    first = output.read_text()
    report = regenerate(source, output, echo, limit=4)
    assert (report.already, report.written) == (4, 0)
    regenerate(source, output, echo)
    assert output.read_text().startswith(first)
    assert Counter(request.messages for request in echo.requests).most_common(1)[0][1] == 1
    assert len(records(output)) == 6


@pytest.mark.parametrize("torn", [1, 30, 10_000])
def test_a_torn_last_line_is_done_again(torn: int, tmp_path: Path) -> None:
    source, output, echo = talks(tmp_path / "in", 3), tmp_path / "out", Echo()
    regenerate(source, output, echo)
    whole = output.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    output.write_bytes(whole[: max(last, len(whole) - torn)])
    report = regenerate(source, output, echo)
    assert (report.already, report.written) == (2, 1)
    assert output.read_bytes() == whole


def test_changed_settings_are_named(tmp_path: Path) -> None:
    source, output = talks(tmp_path / "in", 1), tmp_path / "out"
    regenerate(source, output, Echo(), seed=1)
    with pytest.raises(ValueError, match=r"seed: 1 then, 2 now"):
        regenerate(source, output, Echo(), seed=2)
    with pytest.raises(ValueError, match=r"mixture: .* max_turns"):
        regenerate(source, output, Echo(), seed=1, max_turns=3, mixture=[(ReplySampling(1.0), 1)])
    regenerate(source, output, Echo(), seed=1, batch_size=7, in_flight=2)  # no matter
    with pytest.raises(ValueError, match="choose another output"):
        regenerate(source, source, Echo())


def test_the_mixture_is_kept_and_batches_do_not_mix(tmp_path: Path) -> None:
    greedy, warm = ReplySampling(), ReplySampling(temperature=0.8, top_p=0.95)
    source, echo = talks(tmp_path / "in", 400, 2), Echo()
    regenerate(source, tmp_path / "out", echo, mixture=[(greedy, 3), (warm, 1)], batch_size=16)
    drawn = Counter(record["temperature"] for record in records(tmp_path / "out"))
    assert drawn[0.0] + drawn[0.8] == 400
    # Binomial(400, 1/4): outside of 60..140 once in 10^5; the draw is fixed, so never or always.
    assert 60 <= drawn[0.8] <= 140
    assert sum(len(requests) == 16 for requests, _ in echo.batches) >= 45  # of at least 50
    again = Echo()
    regenerate(source, tmp_path / "again", again, mixture=[(greedy, 3), (warm, 1)], in_flight=3)
    chosen = [{r["id"]: r["temperature"] for r in records(tmp_path / n)} for n in ("out", "again")]
    assert chosen[0] == chosen[1]
    seeds = [{r.messages: r.seed for r in e.requests} for e in (echo, again)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 800


class Moody(Echo):
    """Cuts question 0, is silent at 1, refuses 2, and does each later on for 3, 4 and 5."""

    def reply(self, request: ReplyRequest) -> Reply:
        number, turn = request.messages[-1].content.split()[-1].split(".")
        mood = {("0", "0"): 0, ("1", "0"): 1, ("2", "0"): 2}.get((number, turn))
        if turn == "1":
            mood = {"3": 0, "4": 1, "5": 2}.get(number)
        special = [Reply("cut", finished=False), Reply(" \n"), Reply("", refused="too long")]
        return super().reply(request) if mood is None else special[mood]


def test_cut_empty_and_refused_replies(tmp_path: Path) -> None:
    source, output, moody = talks(tmp_path / "in", 7, 3), tmp_path / "out", Moody()
    report = regenerate(source, output, moody, batch_size=3)
    lengths = {said(r)[0]: (len(r["messages"]), r["finished"]) for r in records(output)}
    assert lengths == {
        "question 0.0": (2, False),
        "question 3.0": (4, False),
        "question 4.0": (2, True),
        "question 5.0": (2, True),
        "question 6.0": (6, True),
    }
    assert report.refused == {EMPTY_REPLY: 1, REJECTED: 1}
    assert report.unfinished == 2
    assert any("too long" in line for line in report.first_refusals)
    echo = Echo()
    again = regenerate(source, output, echo)  # only what was refused is asked again
    assert (again.already, again.written) == (6, 1)
    assert {r.messages[0].content for r in echo.requests} == {"question 2.0"}


def test_equal_and_unusable_conversations(tmp_path: Path) -> None:
    source = talks(tmp_path / "in", 2)
    source.write_text(source.read_text() * 2 + "{}\n")
    report = regenerate(source, tmp_path / "out", Echo(), max_turns=1)
    assert report.written == 2
    assert report.refused == {TWICE: 2, "no conversation": 1}


@pytest.mark.parametrize("in_flight", [1, 3])
def test_an_error_ends_the_run_and_keeps_what_is_done(in_flight: int, tmp_path: Path) -> None:
    source, output, echo = talks(tmp_path / "in", 30), tmp_path / "out", Echo()

    def breaks(requests: Sequence[ReplyRequest], sampling: ReplySampling) -> list[Reply]:
        if len(echo.batches) >= 5:
            raise RuntimeError("the machine is on fire")
        return echo(requests, sampling)

    with pytest.raises(RuntimeError, match="on fire"):
        regenerate(source, output, breaks, in_flight=in_flight)
    done = len(records(output))
    assert 5 <= done <= 5 + in_flight
    assert regenerate(source, output, Echo()).already == done
    assert len({record["id"] for record in records(output)}) == 30


def test_if_every_request_is_rejected_it_stops(tmp_path: Path) -> None:
    def rejects(requests: Sequence[ReplyRequest], _: ReplySampling) -> list[Reply]:
        return [Reply("", refused="no such parameter") for _ in requests]

    with pytest.raises(ValueError, match=r"every request was rejected.*no such parameter"):
        regenerate(talks(tmp_path / "in", 100), tmp_path / "out", rejects)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixture": []}, "mixture is"),
        ({"mixture": [(ReplySampling(), 0)]}, "weights above 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"in_flight": 0}, "in_flight is 0"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_bad_settings(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        regenerate(talks(tmp_path / "in", 1), tmp_path / "out", Echo(), **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 0}])
def test_bad_sampling(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        ReplySampling(**bad)


def test_a_log_with_a_foreign_line_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"id": "a"}\n[1]\n{"id"')
    with pytest.raises(ValueError, match="line 2 is not a record"):
        RecordLog(tmp_path / "log")
    assert (tmp_path / "log").read_text() == '{"id": "a"}\n[1]\n{"id"'


def test_a_full_disk_takes_back_the_half_line(tmp_path: Path, monkeypatch: Any) -> None:
    real = os.write
    with RecordLog(tmp_path / "log") as log:
        log.append({"id": "a"})
        monkeypatch.setattr(os, "write", lambda file, line: real(file, line[:5]))
        with pytest.raises(OSError, match=r"No space left on device.*log"):
            log.append({"id": "b"})
        monkeypatch.undo()
        log.append({"id": "c"})
        assert log.ids == {"a", "c"}
    assert (tmp_path / "log").read_text() == '{"id": "a"}\n{"id": "c"}\n'


def test_many_requests_are_in_flight(tmp_path: Path) -> None:
    together = threading.Barrier(8, timeout=30)

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        together.wait()  # breaks, and fails the request, unless eight are here at once
        return says("ok: " + body["messages"][-1]["content"])

    with ChatServer(answer).running() as server:
        endpoint = Endpoint(server.url + "/", "small", api_key="secret", tries=1)
        sampling = ReplySampling(temperature=0.5, top_p=0.9, max_new_tokens=77)
        source, output = talks(tmp_path / "in", 32, system="Be kind."), tmp_path / "out"
        report = regenerate(source, output, endpoint, in_flight=8, mixture=[(sampling, 1)])
    assert report.written == 32
    assert all(said(record)[2] == "ok: " + said(record)[1] for record in records(output))
    body = server.bodies[0]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    del body["messages"]
    assert 0 <= body.pop("seed") < 2**31
    assert body == {"model": "small", "temperature": 0.5, "top_p": 0.9, "max_tokens": 77}
    assert server.headers[0]["path"] == "/v1/chat/completions"
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(endpoint)


def test_passing_trouble_is_waited_out_and_bad_requests_are_not(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        question = body["messages"][-1]["content"]
        seen[question] += 1
        if question == "question 1.0":
            return 400, {"error": "context is 8192 tokens"}
        if question == "question 2.0":
            return says("half", "length")
        return (503, b"busy") if seen[question] < 3 else says("done")

    with ChatServer(answer).running() as server:
        endpoint = Endpoint(server.url, "small", patience=0.01)
        report = regenerate(talks(tmp_path / "in", 4), tmp_path / "out", endpoint, in_flight=2)
    assert seen == {"question 0.0": 3, "question 1.0": 1, "question 2.0": 1, "question 3.0": 3}
    assert report.refused == {REJECTED: 1}
    assert "status 400" in report.first_refusals[0] and "8192 tokens" in report.first_refusals[0]
    finished = {said(record)[0]: record["finished"] for record in records(tmp_path / "out")}
    assert finished == {"question 0.0": True, "question 2.0": False, "question 3.0": True}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((401, b"who are you"), "rejects requests: status 401: who are you"),
        ((500, b"oops"), "gave no answer in 2 tries .last: status 500: oops"),
        ((200, b"<html>"), "is not JSON"),
        ((200, {"choices": []}), "without choices"),
    ],
)
def test_servers_that_cannot_be_used(answer: tuple[int, Any], words: str, tmp_path: Path) -> None:
    with ChatServer(lambda _: answer).running() as server:
        endpoint = Endpoint(server.url, "small", tries=2, patience=0.01)
        with pytest.raises(EndpointError, match=words):
            regenerate(talks(tmp_path / "in", 3), tmp_path / "out", endpoint, in_flight=2)


def test_no_server_and_no_url(tmp_path: Path) -> None:
    with ChatServer(lambda _: says("x")).running() as server:
        url = server.url
    endpoint = Endpoint(url, "small", tries=2, patience=0.01)
    with pytest.raises(EndpointError, match="gave no answer in 2 tries"):
        regenerate(talks(tmp_path / "in", 1), tmp_path / "out", endpoint)
    with pytest.raises(ValueError, match="allowed: http"):
        Endpoint("localhost:8000", "small")


def test_killed_and_started_again(tmp_path: Path) -> None:
    """SIGKILL in the middle, twice: each conversation once, in order of being finished."""
    source, output = talks(tmp_path / "in", 60, 2), tmp_path / "out"
    gate = threading.Semaphore(40)

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        gate.acquire()  # lets so many answers through, then hangs
        return says("re: " + body["messages"][-1]["content"])

    with ChatServer(answer).running() as server:
        kept = b""
        for _ in range(2):
            command = [sys.executable, "-m", "tests.training.chat_server"]
            client = subprocess.Popen([*command, str(source), str(output), server.url])
            _until(lambda kept=kept: output.exists() and output.stat().st_size > len(kept) + 900, client)
            client.send_signal(signal.SIGKILL)
            client.wait()
            now = output.read_bytes()
            assert now.startswith(kept) and len(now) > len(kept)
            kept = now
            gate.release(40)
        done = {said(json.loads(line))[0] for line in kept.splitlines()}
        gate.release(1000)
        report = regenerate(source, output, Endpoint(server.url, "again"), in_flight=4)
    assert report.already == len(done)
    assert 4 <= len(done) < 60
    assert output.read_bytes().startswith(kept)
    assert Counter(said(record)[0] for record in records(output)) == {f"question {i}.0": 1 for i in range(60)}
    assert all(len(record["messages"]) == 4 for record in records(output))
    # By model name, for a request of a killed client may reach the server late.
    later = [b["messages"][0]["content"] for b in server.bodies if b["model"] == "again"]
    every = {f"question {i}.0" for i in range(60)}
    assert Counter(later) == dict.fromkeys(every - done, 2)


def _until(true: Any, client: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert client.poll() is None, "the client ended by itself"
        assert time.monotonic() < end, "nothing happened for a minute"
        time.sleep(0.01)
