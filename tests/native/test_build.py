"""Building, finding and turning off the kernels, and the OpenMP runtime that they use."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aquiline.native import build as building
from aquiline.native.build import BuildError, build, find_compiler
from aquiline.native.library import find_library, open_library


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AQUILINE_CACHE", str(tmp_path))
    return tmp_path


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    source = os.pathsep.join((str(Path(building.__file__).parents[2]), str(Path(__file__).parents[2])))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_a_build_is_announced_and_made_once(cache_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = build()
    assert "building the CPU kernels" in capfd.readouterr().err
    written = path.stat().st_mtime_ns
    assert build() == path and path.stat().st_mtime_ns == written
    assert not capfd.readouterr().err
    assert path.is_relative_to(cache_folder)
    assert not list(path.parent.glob("*.o"))


def test_two_builders_do_not_meet(cache_folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build(("-O0",)), range(2))
    assert first == second
    open_library(first)


def test_warnings_are_errors(cache_folder: Path) -> None:
    library = build(("-march=native", "-Werror"))
    assert library.is_file() and library.stat().st_size > 0


def test_no_compiler_is_one_line(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache_folder))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler.*install"):
        find_compiler()
    shown = run("from aquiline.native.library import find_library; print(find_library()[0])", PATH=str(cache_folder))
    assert shown.stdout.strip() == "None"
    assert len(shown.stderr.strip().splitlines()) == 1 and "no C++ compiler" in shown.stderr


def test_a_failing_compiler_is_one_line(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = cache_folder / "broken"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1 && exit 0\necho "x.h:1: error: no" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match=r"the compiler failed: x.h:1: error: no"):
        build()
    assert not list(cache_folder.rglob("*.so"))


def test_a_library_that_does_not_fit_is_refused(cache_folder: Path) -> None:
    wrong = cache_folder / "wrong.so"
    wrong.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="cannot load"):
        open_library(wrong)


def test_it_can_be_turned_off() -> None:
    shown = run("from aquiline.native.library import find_library; print(find_library())", AQUILINE_NATIVE="0")
    assert "turned off by AQUILINE_NATIVE=0" in shown.stdout and not shown.stderr


@pytest.mark.parametrize(
    "environment", [{"AQUILINE_NATIVE": "0"}, {"PATH": "", "CXX": "", "AQUILINE_CACHE": "/nowhere"}]
)
def test_everything_runs_without_kernels(environment: dict[str, str]) -> None:
    code = (
        "import torch, aquiline; from tests import tiny\n"
        "loaded = aquiline.load(tiny.hf_model('llama', torch.float32), 'prompt-lookup')\n"
        "ours, plain = (m.generate([5, 6, 5, 6, 5], max_new_tokens=12).token_ids for m in (loaded, loaded.plain()))\n"
        "print(type(loaded.target).__name__, ours == plain)\n"
    )
    assert run(code, **environment).stdout.split() == ["Decoder", "True"]
    refused = (
        "import torch, aquiline; from tests import tiny\n"
        "aquiline.load(tiny.hf_model('llama', torch.float32), exact=True)"
    )
    with pytest.raises(subprocess.CalledProcessError, match="exit status 1") as error:
        run(refused, **environment)
    shown = error.value.stderr
    assert "exact is True" in shown and any(why in shown for why in ("AQUILINE_NATIVE=0", "install g++"))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what Linux says is loaded")
def test_the_only_openmp_runtime_is_torchs() -> None:
    assert find_library()[0] is not None
    code = (
        "from aquiline.native.library import find_library; import torch; find_library()\n"
        "from aquiline.native.stack import readout; from aquiline.native.packing import Memory\n"
        "torch.set_num_threads(2); x = torch.randn(9, 64)\n"
        "readout(Memory(find_library()[0]), torch.randn(64, 64), torch.float32, inputs=64)(x)\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}, sep='\\n')"
    )
    loaded = [line for line in run(code).stdout.splitlines() if any(n in line for n in ("gomp", "iomp", "libomp"))]
    assert len(loaded) == 1 and "torch" in loaded[0], loaded
