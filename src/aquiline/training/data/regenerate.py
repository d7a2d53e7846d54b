"""Replace the assistant's turns of conversations by the target's own words.

A draft head learns to guess what the target says, so the best training text is the target's
own. Each user turn is answered anew, given the system turn and the *regenerated* turns before
it; the answers come from a function, which may run a local model on large batches or ask a
server (`aquiline.training.data.endpoint`) with many requests in flight.

The output is JSON lines in OpenAI's ``messages`` form, ready for `prepare`. A finished
conversation is appended once and never touched again; a run that was killed goes on where it
stopped when it is started again with the same arguments.
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

from aquiline.training.data.conversations import Conversation, Message, Refusal, read_conversations
from aquiline.training.data.identity import conversation_id
from aquiline.training.data.record_log import RecordLog
from aquiline.training.data.replies import Complete, Reply, ReplyRequest, ReplySampling

EMPTY_REPLY = "empty reply"
REJECTED = "request rejected"
TWICE = "occurs twice"

_ALL_REJECTED = 20
_KEPT_REFUSALS = 20


@dataclass(frozen=True)
class RegenerateReport:
    """Counts of one run: ``already`` done by earlier runs, ``written`` and ``refused`` by this."""

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
            f"{self.output}: {self.written:,} conversations, {self.replies:,} answers "
            f"({self.unfinished:,} cut by the budget) in {self.seconds:.1f} s; "
            f"{self.already:,} were there"
        ]
        lines += [f"  refused: {reason}: {count:,}" for reason, count in self.refused.items()]
        return "\n".join(lines)


def regenerate(
    sources: Sequence[str | Path] | str | Path,
    output: str | Path,
    complete: Complete,
    *,
    mixture: Sequence[tuple[ReplySampling, float]] = ((ReplySampling(), 1.0),),
    batch_size: int = 1,
    in_flight: int = 1,
    max_turns: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    progress: Callable[[Counter[str]], None] | None = None,
) -> RegenerateReport:
    """Answer every conversation's user turns anew and append the results to ``output``.

    Each conversation draws one sampling of the mixture by a hash of its text and ``seed``, so
    that a resumed run makes the same choice. A conversation ends at the first answer that the
    budget cuts (``"finished": false``) and before one that is empty or refused. If that is its
    first, it is left out: for good if empty (``output`` + ``.empty.jsonl`` lists those), until
    the next run if refused. Equal conversations are answered once.

    Args:
        sources: files or dataset names, see `read_conversations`.
        output: the JSON lines file; gone on with if it exists.
        complete: answers requests.
        mixture: samplings and their weights (> 0).
        batch_size: conversations answered together in one call of ``complete``.
        in_flight: calls of ``complete`` at the same time, each in its own thread.
        max_turns: answer at most this many turns of a conversation.
        limit: take only this many usable conversations of the sources.
        seed: varies the choice of samplings and the requests' seeds.
        progress: called with the counts after each batch, from any thread.

    Returns:
        The counts of this run.

    Raises:
        ValueError: a bad setting, or an ``output`` made with other settings (says which).
        Exception: whatever ``complete`` raises. What is finished is on the disk; run again.
    """
    started = time.monotonic()
    output = Path(output)
    names = [sources] if isinstance(sources, str | Path) else list(sources)
    plan = _Plan(tuple(mixture), batch_size, max_turns, seed)
    _check(plan, in_flight, limit)
    output.parent.mkdir(parents=True, exist_ok=True)
    _check_settings(output, plan)
    with ExitStack() as stack:
        written = stack.enter_context(RecordLog(output))
        empty = stack.enter_context(RecordLog(_beside(output, ".empty.jsonl")))
        run = _Run(plan, complete, written, empty, progress)
        run.source = _pending(names, run, limit)
        _work(run, in_flight)
    return run.report(output, time.monotonic() - started)


@dataclass(frozen=True)
class _Plan:
    mixture: tuple[tuple[ReplySampling, float], ...]
    batch_size: int
    max_turns: int | None
    seed: int

    def settings(self) -> dict[str, Any]:
        """What decides the answers; batch sizes do not."""
        mixture = [{**asdict(sampling), "weight": weight} for sampling, weight in self.mixture]
        return {"mixture": mixture, "max_turns": self.max_turns, "seed": self.seed}

    def sampling(self, identity: str) -> ReplySampling:
        """The conversation's draw from the mixture."""
        total = sum(weight for _, weight in self.mixture)
        point = _hashed(identity, self.seed, "sampling") / 2**63 * total
        for sampling, weight in self.mixture:
            point -= weight
            if point < 0:
                return sampling
        return self.mixture[-1][0]  # rounding left a rest


@dataclass(eq=False)
class _Talk:
    """One conversation on its way: what is said so far, and what is still to be asked."""

    conversation: Conversation
    identity: str
    sampling: ReplySampling
    said: list[Message]
    to_ask: list[Message]
    replies: int = 0
    finished: bool = True


@dataclass(eq=False)
class _Run:
    """State that the threads share; ``lock`` guards the source and the counts."""

    plan: _Plan
    complete: Complete
    written: RecordLog
    empty: RecordLog
    progress: Callable[[Counter[str]], None] | None
    source: Iterator[_Talk] = field(default_factory=lambda: iter(()))
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    first_refusals: list[str] = field(default_factory=list)

    def refuse(self, refusal: Refusal) -> None:
        """Count a refusal; the caller holds the lock."""
        self.refusals[refusal.reason] += 1
        if len(self.first_refusals) < _KEPT_REFUSALS:
            self.first_refusals.append(str(refusal))

    def report(self, output: Path, seconds: float) -> RegenerateReport:
        """The counts of the finished run."""
        return RegenerateReport(
            output=output,
            already=self.counts["already"],
            written=self.counts["written"],
            replies=self.counts["replies"],
            unfinished=self.counts["unfinished"],
            refused=dict(self.refusals),
            first_refusals=tuple(self.first_refusals),
            seconds=seconds,
        )


def _pending(names: Sequence[str | Path], run: _Run, limit: int | None) -> Iterator[_Talk]:
    """The source's conversations that are not done yet."""
    plan, taken = run.plan, set[str]()
    for name in names:
        for item in read_conversations(name):
            if len(taken) == limit:
                return
            if isinstance(item, Refusal):
                run.refuse(item)
                continue
            identity = conversation_id(item.messages)
            if identity in taken:
                run.refuse(Refusal(item.source, item.index, TWICE, f"id {identity}"))
                continue
            taken.add(identity)
            if identity in run.written.ids or identity in run.empty.ids:
                run.counts["already"] += 1
                continue
            said = [m for m in item.messages if m.role == "system"]
            questions = [m for m in item.messages if m.role == "user"][: plan.max_turns]
            yield _Talk(item, identity, plan.sampling(identity), said, questions)


def _work(run: _Run, in_flight: int) -> None:
    if in_flight == 1:
        _answer_talks(run)
        return
    with ThreadPoolExecutor(in_flight) as pool:
        workers = [pool.submit(_answer_talks, run) for _ in range(in_flight)]
        try:
            wait(workers, return_when=FIRST_EXCEPTION)
        finally:
            run.stop.set()  # the others end after the answers they wait for
    for worker in workers:
        worker.result()


def _answer_talks(run: _Run) -> None:
    """One thread: keeps a batch of conversations going, replacing those that are done."""
    active: list[_Talk] = []
    while not run.stop.is_set():
        with run.lock:
            _refill(active, run)
        if not active:
            return
        batch = _largest_group(active)[: run.plan.batch_size]
        replies = run.complete([_request(talk, run) for talk in batch], batch[0].sampling)
        if len(replies) != len(batch):
            raise ValueError(f"complete gave {len(replies)} replies to {len(batch)} requests")
        for talk, reply in zip(batch, replies, strict=True):
            if _take(talk, reply, run):
                active.remove(talk)
        if run.progress is not None:
            run.progress(run.counts)


def _refill(active: list[_Talk], run: _Run) -> None:
    while len(_largest_group(active)) < run.plan.batch_size:
        talk = next(run.source, None)
        if talk is None:
            return
        active.append(talk)


def _largest_group(active: Sequence[_Talk]) -> list[_Talk]:
    """The talks that share the most frequent sampling, longest waiting first."""
    if not active:
        return []
    [(sampling, _)] = Counter(talk.sampling for talk in active).most_common(1)
    return [talk for talk in active if talk.sampling == sampling]


def _request(talk: _Talk, run: _Run) -> ReplyRequest:
    seed = _hashed(talk.identity, run.plan.seed, talk.replies)
    return ReplyRequest((*talk.said, talk.to_ask[0]), seed)


def _take(talk: _Talk, reply: Reply, run: _Run) -> bool:
    """Put a reply into its conversation; write the conversation and return True if it is done."""
    usable = reply.refused is None and bool(reply.text.strip())
    if usable:
        talk.said += [talk.to_ask.pop(0), Message("assistant", reply.text)]
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
        refusal = Refusal(*where, EMPTY_REPLY, "the target said nothing to the first turn")
        run.empty.append({"id": talk.identity, **asdict(refusal)})  # would only be so again
    else:
        refusal = Refusal(*where, REJECTED, reply.refused)
    with run.lock:
        run.refuse(refusal)
        if run.refusals[REJECTED] >= _ALL_REJECTED and not run.written.ids:
            raise ValueError(f"every request was rejected so far, such as {refusal}")


def _record(talk: _Talk) -> dict[str, Any]:
    return {
        "id": talk.identity,
        "messages": [{"role": m.role, "content": m.content} for m in talk.said],
        "temperature": talk.sampling.temperature,
        "finished": talk.finished,
        "source": f"{talk.conversation.source}:{talk.conversation.index}",
    }


def _hashed(*parts: object) -> int:
    """63 bits that depend on the parts alone."""
    return int(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16], 16) >> 1


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(output.name + suffix)


def _check(plan: _Plan, in_flight: int, limit: int | None) -> None:
    if not plan.mixture or any(not weight > 0 for _, weight in plan.mixture):
        raise ValueError(f"mixture is {plan.mixture}; allowed: samplings with weights above 0")
    given = {
        "batch_size": plan.batch_size,
        "in_flight": in_flight,
        "max_turns": plan.max_turns,
        "limit": limit,
    }
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; allowed: 1 or more")


def _check_settings(output: Path, plan: _Plan) -> None:
    """Refuse to go on with answers that were made another way; else note how these are made."""
    path = _beside(output, ".settings.json")
    now = plan.settings()
    if path.exists():
        then = json.loads(path.read_text(encoding="utf-8"))
        changed = [f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in now if then.get(key) != now[key]]
        if changed:
            raise ValueError(
                f"{output} was begun with other settings ({'; '.join(changed)}); use those, or choose another output"
            )
        return
    if output.exists() and output.stat().st_size:
        raise ValueError(f"{output} exists and no earlier run made it; choose another output")
    partial = _beside(path, ".partial")
    partial.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
