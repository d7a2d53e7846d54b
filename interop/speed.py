"""Compares the speed of greedy decoding in several engines on this machine.

    python interop/speed.py HEAD [--prompts 20] [--limit 128] [--engines llamacpp aquiline] [--threads 2] [--record]

Every engine stays open in a process of its own. Each prompt runs on all of them in turn, in a rotating order, while the
others are stopped. Tokens/s are new tokens over the seconds of the whole call, prefill included, behind a short warm-up
on other text of the same length. An engine that is missing or fails is left out. Logs and converted models are kept in
interop/.work.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import llamacpp_acceptance
import openvino_acceptance
from common import Task, checked, cut, parser, record, task_of
from pieces import HERE, WORK, installed_version
from report import SPEED, SPEED_ENGINES, speed_text

from aquiline.bench.environment import cpu_name

BUSY = 0.1
"""Cores that others may use before a warning."""


class EngineError(Exception):
    """An engine cannot take part; the reason."""


class Engine:
    """An open engine, a process group that runs only while it is asked something; and its results so far."""

    def __init__(self, name: str, python: str, variables: dict[str, str]) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        self.log = WORK / f"speed-{name}.log"
        self.versions: dict[str, str] = {}
        self.outputs: list[list[int]] = []
        self.seconds: list[float] = []
        read, write = os.pipe()
        command = [python, str(HERE / "engine_speed.py"), str(write)]
        with self.log.open("w") as log:
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "pass_fds": [write]}
            # A group in this session: should we be killed, the kernel ends a stopped group that lost its parent.
            self.process = subprocess.Popen(command, env=variables, preexec_fn=os.setpgrp, **streams)
        os.close(write)
        self.answers = os.fdopen(read)

    def ask(self, message: Any) -> dict[str, Any]:
        """Sends a line, and returns the answer; the group runs from here to there."""
        assert self.process.stdin is not None
        self.signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{json.dumps(message)}\n".encode())
            self.process.stdin.flush()
        while not select.select([self.answers], [], [], 1)[0] and self.process.poll() is None:
            pass
        line = self.answers.readline() if select.select([self.answers], [], [], 0)[0] else ""
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)  # it may still be writing why
            said = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()]
            raise EngineError(f"{said[-1].strip()[:200] if said else 'it ended'} ({self.log})")
        self.signal(signal.SIGSTOP)
        return json.loads(line)

    def signal(self, number: int) -> None:
        """Sends a signal to all processes of the group that are left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Ends the group, whatever state it is in."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.signal(signal.SIGKILL)
        self.process.wait()


def environment(engine: str, threads: int) -> tuple[str, dict[str, str]]:
    """An engine's interpreter and variables, from ENGINE_env.sh if there is one, which may have to install it."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if not (HERE / f"{engine}_env.sh").exists():
        return sys.executable, variables
    variables |= {"here": str(HERE), "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
    script = f'. "$here/{engine}_env.sh" >&2; export venv version source; env -0'
    done = subprocess.run(["sh", "-euc", script], env=variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise EngineError(f"{engine}_env.sh ended with {done.returncode}")
    variables = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    if "VLLM_PRELOAD" in variables:
        variables["LD_PRELOAD"] = variables["VLLM_PRELOAD"]
    return f"{variables['venv']}/bin/python", variables


def opened(name: str, task: Task, threads: int) -> Engine:
    """An engine that has loaded its models, converted once, and is stopped."""
    engine, form, *drafts = name.split("-")
    python, variables = environment(engine, threads)
    target, head = task.target, task.head
    if engine == "llamacpp":
        os.environ["LLAMACPP_PACKAGES"] = variables["LLAMACPP_PACKAGES"]
        source = Path(variables["source"])
        target = llamacpp_acceptance.converted_target(source, task, variables["version"], "bf16")
    if engine == "openvino":
        os.environ["AQUILINE_OPTIMUM_CLI"] = variables["AQUILINE_OPTIMUM_CLI"]
        optimum = installed_version(python, "optimum-intel")
        target = openvino_acceptance.converted_target(task, optimum, form)
        head = openvino_acceptance.converted_head(task, optimum) if drafts else head
    context = max(map(len, task.prompts)) + task.limit + task.k + 64
    job = {"engine": engine, "form": form, "drafts": bool(drafts), "target": str(target), "head": str(head)}
    job |= {"k": task.k, "limit": task.limit, "end": task.end, "threads": threads, "context": context}
    made = Engine(name, python, variables)
    try:
        made.versions = made.ask(job)["versions"]
    except BaseException:
        made.end()
        raise
    return made


def cpu_seconds(group: int) -> float:
    """CPU seconds of the machine so far (those that a host took away among them) without those of a process group."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    ticks = user + nice + system + sum(rest)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            ticks -= (int(fields[11]) + int(fields[12])) * (int(fields[2]) == group)
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_cores(begin: tuple[float, float], group: int = -1) -> float:
    """Cores that others used since `begin`, (time, `cpu_seconds` of the group)."""
    return max(0.0, cpu_seconds(group) - begin[1]) / (time.monotonic() - begin[0])


def leave_out(left_out: dict[str, str], name: str, error: BaseException) -> None:
    """Goes on without an engine."""
    left_out[name] = str(error).strip().splitlines()[-1]
    print(f"left out: {name}: {left_out[name]}", file=sys.stderr, flush=True)


def open_all(names: list[str], task: Task, threads: int, engines: dict[str, Engine], left_out: dict[str, str]) -> None:
    """Opens engines one after the other."""
    for name in names:
        print(f"opening {name}", file=sys.stderr, flush=True)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                engines[name] = opened(name, task, threads)
        except (EngineError, SystemExit, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            leave_out(left_out, name, error)


def take_turns(task: Task, engines: dict[str, Engine], left_out: dict[str, str]) -> float:
    """Runs every prompt on each engine; returns the cores that others used meanwhile."""
    busy = []
    for i, prompt in enumerate(task.prompts):
        names = list(engines)
        turn = i % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            engine = engines[name]
            begin = time.monotonic(), cpu_seconds(engine.process.pid)
            try:
                answer = engine.ask(prompt)
            except EngineError as error:
                leave_out(left_out, name, error)
                engines.pop(name).end()
                continue
            busy.append(busy_cores(begin, engine.process.pid))
            engine.outputs.append(cut(answer["tokens"], task.end, task.limit))
            engine.seconds.append(round(answer["seconds"], 4))
        print(f"  {i + 1} of {len(task.prompts)} prompts", file=sys.stderr, flush=True)
    return sum(busy) / max(len(busy), 1)


def results(engines: dict[str, Engine]) -> dict[str, Any]:
    """What is recorded of each engine; `equal` counts the outputs that equal those of Aquiline's plain decoding.

    That is in bfloat16, and for Aquiline's own drafts with the same weights.
    """
    found = {}
    for name, run in engines.items():
        reference = engines.get(name.removesuffix("-auto") if name.endswith("-auto") else "aquiline-bf16")
        pairs = zip(run.outputs, reference.outputs, strict=True) if reference else ()
        equal = sum(ours == theirs for ours, theirs in pairs) if reference else None
        tokens = [len(output) for output in run.outputs]
        found[name] = {"versions": run.versions, "tokens": tokens, "seconds": run.seconds, "equal": equal}
    return found


def warn(busy: float, when: str) -> None:
    """Says that the machine is not idle."""
    if busy > BUSY:
        load = os.getloadavg()[0]
        print(
            f"WARNING: others use {busy:.1f} cores {when} (load {load:.1f}): do not trust the figures", file=sys.stderr
        )


def draw(python: str) -> None:
    """Draws docs/speed.png with matplotlib, which is in llama.cpp's environment if not in ours."""
    command = [str(HERE / "plot_speed.py"), str(SPEED), str(HERE.parent / "docs" / "speed.png")]
    if subprocess.run([python, *command], check=False).returncode:
        print(f"no plot; where matplotlib is installed: python {' '.join(command)}", file=sys.stderr)


def engine_names(prefix: str) -> list[str]:
    """Engines whose names begin so."""
    found = [name for name in SPEED_ENGINES if name.startswith(prefix)]
    if not found:
        raise ArgumentTypeError(f"{prefix!r} begins no engine's name; allowed: {', '.join(SPEED_ENGINES)}")
    return found


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(prompts=20, limit=128)
    options.add_argument("--engines", type=engine_names, nargs="+", default=[list(SPEED_ENGINES)], help="beginnings")
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    args = checked(options)
    names = [name for name in SPEED_ENGINES if any(name in group for group in args.engines)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the engines end with us
    begin = time.monotonic(), cpu_seconds(-1)
    time.sleep(1)
    warn(busy_cores(begin), "now")
    task, engines, left_out = task_of(args), dict[str, Engine](), dict[str, str]()
    try:
        open_all(names, task, args.threads, engines, left_out)
        busy = take_turns(task, engines, left_out)
    finally:
        for engine in engines.values():
            engine.end()
    if not engines:
        raise SystemExit("no engine took part")
    result: dict[str, Any] = {"engines": results(engines), "left_out": left_out, "busy_cores": round(busy, 2)}
    result |= {"cpu": cpu_name(), "threads": args.threads, "target": args.target, "prompts": len(task.prompts)}
    result |= {"limit": task.limit, "k": task.k, **task.identity}
    print(speed_text(result))
    warn(busy, "during the measurements")
    if args.record:
        record("speed", result)
        llamacpp = any(name.startswith("llamacpp") for name in engines)
        draw(environment("llamacpp", args.threads)[0] if llamacpp else sys.executable)
    drafting = [(name, run["equal"]) for name, run in result["engines"].items() if name.endswith("-auto")]
    changed = [name for name, equal in drafting if equal not in (None, len(task.prompts))]
    if changed:
        raise SystemExit(f"drafts changed the output of {', '.join(changed)}")


if __name__ == "__main__":
    main()
