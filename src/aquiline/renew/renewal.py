"""Renews the head of a running server: keeps conversations, trains while nothing is asked, swaps, and rolls back.

One thread looks ten times a second. A request stops the training process at once (SIGSTOP), and a long rush ends it
(SIGKILL): it resumes from its checkpoint. The thread serves the version that the folder points to, whoever moved the
pointer: the gate's verdict, a fall of acceptance after a swap, or `aquiline renew --rollback`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aquiline.engine.request import GenerationOutput
from aquiline.loading import Loaded
from aquiline.models.files import locked
from aquiline.renew.settings import LEAST_TOKENS, open_renewal
from aquiline.renew.store import ConversationStore, answer_tokens, read_store
from aquiline.renew.versions import current, end_candidate, last_candidate, record, roll_back
from aquiline.serve.server import Companion

logger = logging.getLogger("aquiline")

POLL = 0.1
"""Seconds between two looks at the server."""

QUIET = 5.0
"""Seconds without a request before training resumes."""

PATIENCE = 60.0
"""Seconds that a stopped process is kept in memory before it is killed. Each kill doubles them until a stage ends: what
the process did since its last checkpoint is lost, and quiet spells may be shorter than a stage."""

RECHECK = 60.0
"""Seconds between two counts of the stored conversations."""

PROBATION = 100_000
"""Judged first drafts after a swap within which a fall of acceptance takes the head back."""

STAGE = (sys.executable, "-m", "aquiline.renew.slices")
"""Command of a training process, which does the next stage of the folder that it is given."""


class Renewal:
    """Renews the head of a model. Its methods may be called from any thread.

    Args:
        folder: of the renewal, see `aquiline.renew.settings.open_renewal`.
        loaded: the served model; an EAGLE head drafts.
        busy: whether requests run or wait.
    """

    def __init__(self, folder: Path, loaded: Loaded, busy: Callable[[], bool]) -> None:
        self.folder, self._loaded, self._busy = folder, loaded, busy
        self._store = ConversationStore(folder / "conversations")
        served = current(folder)
        assert served is not None, "a renewal begins with a version"
        self._serving, self._moved = 0, 0
        self._probation: int | None = None  # judged first drafts when the head was swapped in
        self._alarms = 0
        self._quiet_since = time.monotonic()
        self._paused_since: float | None = None
        self._patience = PATIENCE
        self._process: subprocess.Popen[bytes] | None = None
        self._checked = -RECHECK
        self._kept = LEAST_TOKENS  # answer tokens since the last count, with repeated answers; earlier starts kept some
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aquiline-renewal", daemon=True)
        if served.number:
            self._swap(served.number)
            self._probation = None  # nothing was served yet that it could be compared with

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and its training process, which resumes at the next start."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._kill()
        self._store.close()

    def keep(self, output: GenerationOutput) -> None:
        """Stores a finished output; a disk that is full costs the conversation, not the request."""
        try:
            self._store.add(output.prompt_tokens, output.token_ids)
            self._kept += len(output.token_ids)
        except OSError as error:
            logger.warning("a conversation was not kept: %s", error)

    def health(self) -> dict[str, Any]:
        """The served version, and what the renewal does now."""
        paused, running = self._paused_since is not None, self._process is not None
        return {"version": self._serving, "training": "paused" if paused else "running" if running else "idle"}

    # -- in the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(POLL):
            try:
                self.look()
            except (OSError, ValueError, RuntimeError) as error:
                logger.warning("the renewal failed: %s", error)
                record(self.folder, "failure", error=str(error))
                self._give_up()
                self._stopping.wait(RECHECK)  # no process is left that a request would have to pause

    def look(self) -> None:
        """Does what is due now, and returns at once."""
        now = time.monotonic()
        if self._busy():
            self._quiet_since = now
            self._pause(now)
        elif now - self._quiet_since >= QUIET:
            self._work()
        self._judge_swap()
        moved = (self.folder / "current").stat().st_mtime_ns
        if moved != self._moved:
            served, self._moved = current(self.folder), moved
            if served is not None and served.number != self._serving:
                self._swap(served.number)

    def _pause(self, now: float) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        if self._paused_since is None:
            self._process.send_signal(signal.SIGSTOP)
            self._paused_since = now
        elif now - self._paused_since > self._patience:
            self._kill()
            self._patience *= 2

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._paused_since = None

    def _work(self) -> None:
        process = self._process
        if process is None:
            if self._due():
                self._start_stage()
        elif process.poll() is not None:
            self._process = self._paused_since = None
            self._patience = PATIENCE
            if process.returncode:
                log = self.folder / "training-log.txt"
                raise RuntimeError(f"a training process ended with {process.returncode}; see {log}")
        elif self._paused_since is not None:
            process.send_signal(signal.SIGCONT)
            self._paused_since = None

    def _due(self) -> bool:
        """Whether a candidate is in training, or enough was served since the last one."""
        if (self.folder / "training").is_dir():
            return True
        now = time.monotonic()
        if self._kept < LEAST_TOKENS or now - self._checked < RECHECK:
            return False
        # Reading a large store takes a second of the server: only where there may be enough.
        self._checked = now
        self._kept = answer_tokens(read_store(self.folder / "conversations"), last_candidate(self.folder))
        return self._kept >= LEAST_TOKENS

    def _start_stage(self) -> None:
        work = self.folder / "training"
        work.mkdir(exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        with (work / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [*STAGE, str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _give_up(self) -> None:
        """Ends a candidate that failed."""
        self._kill()
        end_candidate(self.folder)

    # -- the served head ----------------------------------------------------------------------------

    def _swap(self, number: int) -> None:
        watch = self._loaded.watch
        self._loaded.swap_head(self.folder / "versions" / f"{number:04d}")
        with self._loaded.engine.lock:
            watch.expect_recent("head")
        self._serving, self._probation, self._alarms = number, watch.judged("head"), watch.raised.get("head", 0)
        logger.info("version %d of the head is served", number)

    def _judge_swap(self) -> None:
        """Rolls back where acceptance fell after a swap."""
        watch = self._loaded.watch
        if self._probation is None:
            return
        if watch.raised.get("head", 0) > self._alarms:
            number = roll_back(self.folder, "acceptance fell after the swap")
            logger.warning("acceptance fell after the swap: version %d of the head is served again", number)
            self._probation = None
            self._swap(number)
            self._probation = None
        elif watch.judged("head") - self._probation > PROBATION:
            self._probation = None


def accompany(
    folder: Path, data: Sequence[str], dtype: str | None, loaded: Loaded, busy: Callable[[], bool]
) -> Companion:
    """Opens a renewal of a model that is about to be served, and starts it.

    Args:
        data: training sets of the head's original data; empty: those of an earlier start.
        dtype: that the model was loaded in, None for its default.

    Raises:
        ValueError: if no EAGLE head drafts, acceptance is lossy, or another server uses the folder.
    """
    head, target = loaded.head, loaded.target_path
    if head is None or target is None:
        raise ValueError(f"renew needs an EAGLE head, and {loaded.draft_name} drafts; give one with --draft")
    if loaded.engine.lossy is not None:
        raise ValueError("renew has no effect on lossy outputs, which are not the target's; drop one of the two")
    made = {"data": data, "depth": head.drafter.policy.depth, "dtype": dtype, "device": str(loaded.target.device)}
    with ExitStack() as stack:
        stack.enter_context(locked(folder))
        open_renewal(folder, target, head.path, made)
        renewal = Renewal(folder, loaded, busy)
        stack.callback(renewal.stop)
        renewal.start()
        return Companion(renewal.keep, renewal.health, stack.pop_all().close)
