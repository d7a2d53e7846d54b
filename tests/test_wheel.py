"""The wheel works alone: built, installed outside the repository, and run from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import aquiline
from tests.conftest import runs_kernels

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A copy, so that no `build` folder of an earlier version gets into the wheel.
    shutil.copytree(
        ROOT / "src" / "aquiline", source / "src" / "aquiline", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)
    (wheel,) = folder.glob("aquiline-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


def run(installed: Path, *words: str) -> str:
    """Runs Python with the installed wheel and the environment's dependencies, in a folder of its own."""
    elsewhere = installed.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *words], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_package_is_the_one_that_runs_and_has_its_data(installed: Path) -> None:
    code = (
        "import aquiline, json; from aquiline.checkpoints.open import SHIPPED; "
        "print(json.dumps([aquiline.__file__, str(SHIPPED)]))"
    )
    module, shipped = map(Path, json.loads(run(installed, "-c", code)))
    assert module == installed / "aquiline" / "__init__.py" and shipped.is_relative_to(installed)
    for folder in ("heads", "bench/prompts"):
        here = ROOT / "src" / "aquiline" / folder
        expected = {str(file.relative_to(here)) for file in here.rglob("*") if file.is_file()}
        there = installed / "aquiline" / folder
        assert {str(file.relative_to(there)) for file in there.rglob("*") if file.is_file()} == expected
        assert len(expected) > 5
    assert (installed / "aquiline" / "py.typed").is_file()
    sources = {file.name for file in (installed / "aquiline" / "native").iterdir()}
    assert sources >= {
        file.name for file in (ROOT / "src" / "aquiline" / "native").iterdir() if file.suffix in (".cpp", ".h")
    }


@pytest.mark.real
def test_its_commands_run_outside_the_repository(installed: Path, smollm2_folder: Path) -> None:
    assert smollm2_folder.is_dir()
    command = str(installed / "bin" / "aquiline")
    assert run(installed, command, "--version").split() == ["aquiline", aquiline.__version__]
    assert "native kernels" in run(installed, command, "doctor")
    if runs_kernels():
        assert "native.so" in run(installed, command, "build")
    words = ("generate", "Name three colours.", "--max-new-tokens", "16", "--temperature", "0", "--json")
    drafted = json.loads(run(installed, command, *words))
    assert len(drafted["token_ids"]) == 16 and drafted["text"].strip()
    assert drafted["stats"]["accepted"] > 0, "the shipped head drafts"
