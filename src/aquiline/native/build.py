"""Builds the C++ kernels for this machine at first use, into the cache folder.

The library has a plain C interface and links nothing of torch: it is built in seconds, and does not
depend on torch's version. OpenMP's symbols are left undefined, so that they resolve to the runtime
that torch has loaded: a second one would bring a second pool of threads.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aquiline.models.cache_folder import build_once, cache_root, is_complete

SOURCES = ("native.cpp", "stack.cpp")
COMPILERS = ("c++", "g++", "clang++")
LIBRARY = "native.so"
FLAGS = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp",
    # A formula must round alike wherever it is inlined.
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
    # GCC 12's own AVX-512 headers.
    "-Wno-maybe-uninitialized",
)
"""Flags of every build; the instruction set comes on top."""

EXTRA_FLAGS = "AQUILINE_CXXFLAGS"
"""Environment variable with more flags for compiling and linking, such as those of a sanitizer."""

TIME_LIMIT = 300
"""Seconds that a compiler may take."""


class BuildError(Exception):
    """The kernels cannot be built here; the message is one line."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that was found."""

    path: str
    version: str


def find_compiler() -> Compiler:
    """Returns ``$CXX`` or the first of `COMPILERS` on the PATH.

    Raises:
        BuildError: if there is none.
    """
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(path, shown.splitlines()[0] if shown else "unknown")
    raise BuildError(f"no C++ compiler: looked for $CXX, {', '.join(COMPILERS)}; install g++ or clang++")


def cpu_identity() -> str:
    """Returns the model and features of the processor, which decide its code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    facts = {line.split(":")[0].strip(): line for line in lines if line.split(":")[0].strip() in wanted}
    return f"{platform.machine()} " + " ".join(facts.values())


def build(extra: Sequence[str] = ("-march=native",)) -> Path:
    """Returns the built library, compiling it unless the cache holds it.

    Args:
        extra: flags beside `FLAGS`; they name the instruction set.

    Raises:
        BuildError: if there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    here = Path(__file__).parent
    extra = (*extra, *os.environ.get(EXTRA_FLAGS, "").split())
    digest = hashlib.sha256()
    for file in sorted((*here.glob("*.h"), *here.glob("*.cpp"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    stamp = {
        "source": digest.hexdigest(),
        "compiler": f"{compiler.path}: {compiler.version}",
        "flags": [*FLAGS, *extra],
        "cpu": cpu_identity(),
    }
    key = hashlib.sha256(repr(sorted(stamp.items())).encode()).hexdigest()[:16]
    folder = cache_root() / "native" / key
    if not is_complete(folder, stamp):
        print("aquiline: building the CPU kernels for this machine, once (some seconds)", file=sys.stderr, flush=True)
    try:
        build_once(folder, stamp, lambda partial: _compile(compiler, here, extra, partial / LIBRARY))
    except OSError as error:
        raise BuildError(f"cannot write the kernels to {folder}: {error}; set AQUILINE_CACHE") from error
    return folder / LIBRARY


def _compile(compiler: Compiler, here: Path, extra: Sequence[str], target: Path) -> None:
    # Compiling and linking apart: -fopenmp would link a runtime of its own.
    objects = [target.with_name(f"{Path(source).stem}.o") for source in SOURCES]
    # A preloaded sanitizer would run in the compiler as well.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    commands = [
        [compiler.path, *FLAGS, *extra, "-c", str(here / source), "-o", str(file)]
        for source, file in zip(SOURCES, objects, strict=True)
    ]
    running = [_start(command, environment) for command in commands]
    try:
        for process in running:
            _check(process)
        sanitizers = [flag for flag in extra if flag.startswith("-fsanitize")]
        linked = [compiler.path, "-shared", *sanitizers, *map(str, objects), "-o", str(target)]
        _check(_start(linked, environment))
    finally:
        for process in running:
            process.kill()
        for file in objects:
            file.unlink(missing_ok=True)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def _check(process: subprocess.Popen[str]) -> None:
    try:
        errors = process.communicate(timeout=TIME_LIMIT)[1]
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise BuildError(f"the compiler took more than {TIME_LIMIT} s") from error
    if process.returncode:
        first = next((line for line in errors.splitlines() if "error" in line), errors.strip()[:200])
        raise BuildError(f"the compiler failed: {first}")
