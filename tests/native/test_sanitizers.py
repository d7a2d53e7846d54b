"""The tests of the kernels once more, on builds that watch every address and every undefined operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aquiline.native.build import EXTRA_FLAGS, find_compiler

ROOT = Path(__file__).parents[2]
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
TESTED = (
    "tests/native/test_products.py",
    "tests/native/test_codes.py",
    "tests/native/test_draft.py",
    "tests/native/test_stack.py",
    "tests/targets/test_native.py",
    "tests/drafters/test_native.py",
)


def runtime() -> str:
    """Path of the address sanitizer's library, which must be loaded before Python."""
    command = [find_compiler().path, "-print-file-name=libasan.so"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip("this compiler comes without libasan")
    return path


def sanitized(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        EXTRA_FLAGS: FLAGS,
        "LD_PRELOAD": runtime(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000
    )


@pytest.mark.verify
@pytest.mark.timeout(3100)
def test_the_kernels_are_clean() -> None:
    done = sanitized("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "3000", *TESTED)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_read_out_of_bounds_is_caught() -> None:
    """A call that claims more rows than there are, which the checks in Python prevent."""
    code = (
        "import torch; from aquiline.native import stack\n"
        "from aquiline.native.library import ReadoutCall, find_library\n"
        "from aquiline.native.packing import Memory\n"
        "product = stack.readout(Memory(find_library()[0]), torch.randn(8, 64), torch.float32, inputs=64)\n"
        "x, out = torch.randn(1, 64), torch.empty(1, 8)\n"
        "product.library.read_out(product.struct, ReadoutCall(x.data_ptr(), out.data_ptr(), 1000, 1, 0))\n"
    )
    done = sanitized("-c", code)
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr
