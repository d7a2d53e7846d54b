"""Replaces the assistant's turns of conversations with the target's own answers.

A draft head learns to predict the target, so the target's own text is the best training data. Each
user turn is answered again, or for the first time, given the system turn and the *regenerated*
turns before it. The answers come from a function, which may run a local model on large batches or
query a server (`aquiline.training.data.endpoint`) with many requests in flight.

The output is JSON lines in OpenAI's ``messages`` form, ready for `prepare`. A finished conversation is
appended once and never changed; a killed run resumes when it is repeated with the same arguments.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aquiline.models.files import locked, write_text
from aquiline.training.data.conversations import Conversation, Refusal, Refusals, read_conversations
from aquiline.training.data.messages import UNSUPPORTED, Message, conversation_id
from aquiline.training.data.record_log import RecordLog
from aquiline.training.data.replies import Complete, RegenerateSettings, Reply, ReplyRequest, ReplySampling

EMPTY_REPLY = "empty reply"
REJECTED = "request rejected"
TWICE = "occurs twice"

_ALL_REJECTED = 20


@dataclass(frozen=True)
class RegenerateReport:
    """Counts of a run: conversations `already` done by earlier runs, `written` and `refused` by this one."""

    output: Path
    already: int
    written: int
    replies: int
    unfinished: int
    refused: Mapping[str, int]
    first_refusals: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"{self.output}: {self.written:,} conversations, {self.replies:,} answers ({self.unfinished:,} cut by the "
            f"budget) in {self.seconds:.1f} s; {self.already:,} were already done"
        ]
        lines += [f"  refused: {reason}: {count:,}" for reason, count in self.refused.items()]
        return "\n".join(lines)


def regenerate(
    sources: Sequence[str | Path] | str | Path,
    output: str | Path,
    complete: Complete,
    *,
    progress: Callable[[Counter[str]], None] | None = None,
    **settings: Any,
) -> RegenerateReport:
    """Answers all user turns of the conversations, answered before or not, and appends the results to `output`.

    A hash of its text and the seed selects each conversation's sampling, so a resumed run makes the same choice. A
    conversation ends at the first answer that the budget cuts (``"finished": false``) and before an answer that is
    empty or refused. If that is its first answer, the conversation is skipped: permanently if empty (listed in
    `output` + ``.empty.jsonl``), until the next run if refused. Equal conversations are answered once.

    Args:
        sources: files or dataset names, see `read_conversations`.
        output: the JSON lines file; resumed if it exists.
        complete: answers requests, `batch_size` conversations in a call.
        progress: called with the counts after each batch, from any thread.
        settings: fields of `RegenerateSettings`, such as ``max_turns=2``.

    Raises:
        ValueError: for an invalid setting, or an `output` made with different settings (named).
        Exception: whatever `complete` raises. Finished conversations are on disk; run again.
    """
    started = time.monotonic()
    output = Path(output)
    names = [sources] if isinstance(sources, str | Path) else list(sources)
    chosen = RegenerateSettings(**settings)
    with ExitStack() as stack:
        stack.enter_context(locked(output))
        _check_settings(output, chosen.deciding())
        written = stack.enter_context(RecordLog(output))
        empty = stack.enter_context(RecordLog(_beside(output, ".empty.jsonl")))
        run = _Run(chosen, complete, written, empty, progress)
        run.source = _pending(names, run)
        _work(run)
    return run.report(output, time.monotonic() - started)


@dataclass(eq=False)
class _Talk:
    """A conversation in progress: the turns so far, and the remaining user turns."""

    conversation: Conversation
    identity: str
    sampling: ReplySampling
    said: list[Message]
    to_ask: list[Message]
    replies: int = 0
    finished: bool = True


@dataclass(eq=False)
class _Run:
    """State shared by the threads; `lock` guards the source and the counts."""

    settings: RegenerateSettings
    complete: Complete
    written: RecordLog
    empty: RecordLog
    progress: Callable[[Counter[str]], None] | None
    source: Iterator[_Talk] = field(default_factory=lambda: iter(()))
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    refused: Refusals = field(default_factory=Refusals)

    def report(self, output: Path, seconds: float) -> RegenerateReport:
        return RegenerateReport(
            output=output,
            already=self.counts["already"],
            written=self.counts["written"],
            replies=self.counts["replies"],
            unfinished=self.counts["unfinished"],
            refused=dict(self.refused.counts),
            first_refusals=tuple(self.refused.first),
            seconds=seconds,
        )


def _pending(names: Sequence[str | Path], run: _Run) -> Iterator[_Talk]:
    """Yields the source's conversations that are not done yet."""
    settings, taken = run.settings, set[str]()
    for name in names:
        for item in read_conversations(name, unanswered=True):
            if len(taken) == settings.limit:
                return
            if isinstance(item, Refusal):
                run.refused.add(item)
                continue
            identity = conversation_id(item.messages)
            if identity in taken:
                run.refused.add(Refusal(item.source, item.index, TWICE, f"id {identity}"))
                continue
            taken.add(identity)
            if item.text or item.tools or any(m.role == "tool" for m in item.messages):
                detail = "tools and preformatted texts cannot be answered again; prepare them without regeneration"
                run.refused.add(Refusal(item.source, item.index, UNSUPPORTED, detail))
                continue
            if identity in run.written.ids or identity in run.empty.ids:
                run.counts["already"] += 1
                continue
            said = [m for m in item.messages if m.role == "system"]
            questions = [m for m in item.messages if m.role == "user"][: settings.max_turns]
            yield _Talk(item, identity, _sampling(identity, settings), said, questions)


def _sampling(identity: str, settings: RegenerateSettings) -> ReplySampling:
    """Draws a conversation's sampling from the mixture."""
    total = sum(weight for _, weight in settings.mixture)
    point = _hashed(identity, settings.seed, "sampling") / 2**63 * total
    for sampling, weight in settings.mixture:
        point -= weight
        if point < 0:
            return sampling
    return settings.mixture[-1][0]  # rounding left a remainder


def _work(run: _Run) -> None:
    in_flight = run.settings.in_flight
    if in_flight == 1:
        _answer_talks(run)
        return
    with ThreadPoolExecutor(in_flight) as pool:
        workers = [pool.submit(_answer_talks, run) for _ in range(in_flight)]
        try:
            wait(workers, return_when=FIRST_EXCEPTION)
        finally:
            run.stop.set()  # the other threads stop after their pending answers
    for worker in workers:
        worker.result()


def _answer_talks(run: _Run) -> None:
    """Runs one thread: keeps a batch of conversations in progress and replaces finished ones."""
    active: list[_Talk] = []
    while not run.stop.is_set():
        with run.lock:
            _refill(active, run)
        if not active:
            return
        batch = _largest_group(active)[: run.settings.batch_size]
        replies = run.complete([_request(talk, run) for talk in batch], batch[0].sampling)
        if len(replies) != len(batch):
            raise ValueError(f"complete gave {len(replies)} replies to {len(batch)} requests")
        for talk, reply in zip(batch, replies, strict=True):
            if _take(talk, reply, run):
                active.remove(talk)
        if run.progress is not None:
            run.progress(run.counts)


def _refill(active: list[_Talk], run: _Run) -> None:
    while len(_largest_group(active)) < run.settings.batch_size:
        talk = next(run.source, None)
        if talk is None:
            return
        active.append(talk)


def _largest_group(active: Sequence[_Talk]) -> list[_Talk]:
    """Returns the talks with the most frequent sampling, longest waiting first."""
    if not active:
        return []
    [(sampling, _)] = Counter(talk.sampling for talk in active).most_common(1)
    return [talk for talk in active if talk.sampling == sampling]


def _request(talk: _Talk, run: _Run) -> ReplyRequest:
    seed = _hashed(talk.identity, run.settings.seed, talk.replies)
    return ReplyRequest((*talk.said, talk.to_ask[0]), seed)


def _take(talk: _Talk, reply: Reply, run: _Run) -> bool:
    """Adds a reply to its conversation; if it is done, writes the conversation and returns True."""
    usable = reply.refused is None and bool(reply.text.strip() or reply.reasoning.strip())
    if usable:
        talk.said += [talk.to_ask.pop(0), Message("assistant", reply.text, reply.reasoning)]
        talk.replies += 1
        talk.finished = reply.finished
        if talk.to_ask and reply.finished:
            return False
    if talk.replies:
        run.written.append(_record(talk))
        with run.lock:
            run.counts.update(written=1, replies=talk.replies, unfinished=int(not talk.finished))
    else:
        _refuse(talk, reply, run)
    return True


def _refuse(talk: _Talk, reply: Reply, run: _Run) -> None:
    where = talk.conversation.source, talk.conversation.index
    if reply.refused is None:
        refusal = Refusal(*where, EMPTY_REPLY, "the target's answer to the first turn is empty")
        run.empty.append({"id": talk.identity, **asdict(refusal)})  # a retry would be empty too
    else:
        refusal = Refusal(*where, REJECTED, reply.refused)
    with run.lock:
        run.refused.add(refusal)
        if run.refused.counts[REJECTED] >= _ALL_REJECTED and not run.written.ids:
            raise ValueError(f"every request was rejected so far, for example {refusal}")


def _record(talk: _Talk) -> dict[str, Any]:
    return {
        "id": talk.identity,
        "messages": [m.as_dict() for m in talk.said],
        "temperature": talk.sampling.temperature,
        "finished": talk.finished,
        "source": f"{talk.conversation.source}:{talk.conversation.index}",
    }


def _hashed(*parts: object) -> int:
    """Returns a 63-bit hash of the parts."""
    return int(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16], 16) >> 1


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(output.name + suffix)


def _check_settings(output: Path, now: dict[str, Any]) -> None:
    """Rejects an output made with different settings; records the settings of a new one."""
    path = _beside(output, ".settings.json")
    if path.exists():
        then = json.loads(path.read_text(encoding="utf-8"))
        changed = [f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in now if then.get(key) != now[key]]
        if changed:
            raise ValueError(
                f"{output} was started with different settings ({'; '.join(changed)}); use those, or choose another "
                "output"
            )
        return
    if output.exists() and output.stat().st_size:
        raise ValueError(f"{output} exists, but not from an earlier run; choose another output")
    write_text(path, json.dumps(now, indent=2) + "\n")
