"""The rules of docs/ARCHITECTURE.md, read off the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "aquiline"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("checks", "race"),
    ("tree", "sampling", "stats"),
    ("verify", "cache"),
    ("models",),
    ("native",),
    ("targets",),
    ("drafters",),
    ("checkpoints",),
    ("decode",),
    ("engine",),
    ("loading",),
    ("training", "bench", "serve"),
    ("check",),
    ("renew",),
    ("commands", "cli"),
)
"""From the bottom to the top; a module belongs to the longest entry that it begins with."""

APART = ("training", "bench", "serve")
"""Never import each other."""

TRANSFORMERS_AT_THE_TOP = "targets.hf_cache"
"""Its classes derive from classes of transformers; it is itself imported inside functions alone."""

TOPICS = {
    "drafters/test_sizes.py",  # the largest tree of every drafter
    "findings/test_ablations.py",  # of benchmarks/findings
    "native/test_instructions.py",
    "native/test_products.py",  # of matrix.h
    "native/test_sanitizers.py",
    "renew/test_served.py",  # with `aquiline serve`
    "serve/test_page.py",
    "targets/test_deep_trees.py",
    "training/test_devices.py",
    "training/test_other_targets.py",
    "training/test_real_training.py",
    "training/learners/test_parity.py",
}
"""Tests in a folder that cover a subject instead of one module; those at the top cover the whole."""

LONG_DOCSTRINGS = {
    "loading.load",  # a line for each of its arguments, twice
}
"""Functions whose docstrings do not count as lines."""

LONG_FILES = {
    "drafters/eagle.py": 345,  # one drafter: three ways to fill a tree share its levels
}


@dataclass(frozen=True)
class Import:
    """One import: who, what, and whether it runs when the module is imported."""

    module: str
    imported: str
    line: int
    at_once: bool


@cache
def modules() -> dict[str, ast.Module]:
    """Module (without the package's name; "" for the package itself) → its syntax tree."""
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def imports() -> Iterator[Import]:
    for module, parsed in modules().items():
        late = {
            id(node)
            for block in ast.walk(parsed)
            if isinstance(block, ast.FunctionDef | ast.If)
            and (isinstance(block, ast.FunctionDef) or ast.unparse(block.test) == "TYPE_CHECKING")
            for node in ast.walk(block)
        }
        for node in ast.walk(parsed):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}, line {node.lineno}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                yield Import(module, name, getattr(node, "lineno", 0), id(node) not in late)


def own(name: str) -> str | None:
    """The module of this package that an imported name is or lies in; None for other packages."""
    if name != "aquiline" and not name.startswith("aquiline."):
        return None
    inner = name.removeprefix("aquiline").removeprefix(".")
    return inner if inner in modules() else inner.rpartition(".")[0]


def layer(module: str) -> int:
    places = [(len(prefix), i) for i, names in enumerate(LAYERS) for prefix in names if _within(module, prefix)]
    assert places, f"{module} is in no layer; give it a place in LAYERS and in docs/ARCHITECTURE.md"
    return max(places)[1]


def _within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def test_imports_go_down_only() -> None:
    wrong = []
    for found in imports():
        target = own(found.imported)
        # The package's own names (`import aquiline`) are for users and for the version.
        if not target or not found.module:
            continue
        if layer(target) > layer(found.module):
            wrong.append(f"{found.module}, line {found.line}, imports {target}, which lies above it")
        sides = [next((name for name in APART if _within(m, name)), None) for m in (found.module, target)]
        if None not in sides and sides[0] != sides[1]:
            wrong.append(f"{found.module}, line {found.line}, imports {target}: {sides[0]} and {sides[1]} stay apart")
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Also inside functions: a circle that is hidden there is still one."""
    edges: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        target = own(found.imported)
        if target and target != found.module:
            edges[found.module].add(target)
    # The completion script is made from the parser that lists it.
    edges["commands.completion"].discard("cli")
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path, module))
        if module not in done:
            for target in sorted(edges[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_transformers_is_imported_when_it_is_needed() -> None:
    at_once = {i.module for i in imports() if i.at_once and i.imported.split(".")[0] == "transformers"}
    assert at_once <= {TRANSFORMERS_AT_THE_TOP}
    users = [i.module for i in imports() if i.at_once and own(i.imported) == TRANSFORMERS_AT_THE_TOP]
    assert not users, f"{users} import {TRANSFORMERS_AT_THE_TOP} at once, and transformers with it"


@pytest.mark.parametrize("name", ["", "cli", "commands"])
def test_the_command_line_starts_without_torch(name: str) -> None:
    heavy = ("torch", "transformers", "numpy", "safetensors", "rich", "tokenizers", "huggingface_hub")
    for found in imports():
        if found.at_once and (found.module == name or (name and _within(found.module, name))):
            assert found.imported.split(".")[0] not in heavy, f"{found.module}, line {found.line}: {found.imported}"
            inner = own(found.imported)
            assert inner is None or inner == "" or _within(inner, "commands"), f"{found.module} imports {inner} at once"


def test_no_bare_except_and_nothing_hidden() -> None:
    for module, parsed in modules().items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{module}, line {node.lineno}: a bare except"


def test_functions_fit_on_a_screen() -> None:
    long = set()
    for module, parsed in modules().items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name, lines = f"{module}.{node.name}", (node.end_lineno or 0) - node.lineno + 1
                if name in LONG_DOCSTRINGS and lines > 40:
                    long.add(name)
                    lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                assert lines <= 40, f"{name} has {lines} lines; allowed: 40"
    assert long == LONG_DOCSTRINGS, "these fit by now"


def test_files_hold_one_concept() -> None:
    for file in SOURCE.rglob("*.py"):
        lines, allowed = len(file.read_text(encoding="utf-8").splitlines()), 300
        allowed = LONG_FILES.get(str(file.relative_to(SOURCE)), allowed)
        assert lines <= allowed, f"{file.relative_to(ROOT)} has {lines} lines; allowed: {allowed}"


def test_everything_has_a_docstring() -> None:
    for module, parsed in modules().items():
        assert ast.get_docstring(parsed), f"{module or 'aquiline'} has no docstring"
        for node in parsed.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{module}.{node.name} is public and has no docstring"


def test_the_document_names_exactly_the_modules() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", text, flags=re.MULTILINE)
    named = [name for name, _ in lines]
    existing = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if file.name != "__init__.py"}
    assert len(named) == len(set(named)), "a module is named twice"
    assert set(named) - existing == set(), "the document names modules that do not exist"
    assert existing - set(named) == set(), "the document lacks modules"


def test_the_document_draws_the_layers_that_are_tested() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawn = re.search(r"```layers\n(.+?)```", text, flags=re.DOTALL)
    assert drawn is not None
    rows = [line.partition("—")[0].split() for line in drawn.group(1).strip().splitlines()]
    assert tuple(tuple(row) for row in reversed(rows)) == LAYERS


def test_tests_mirror_the_source() -> None:
    """A test in a folder bears the name of the module that it tests, or is a topic."""
    tests = ROOT / "tests"
    found = {str(file.relative_to(tests)) for file in tests.glob("*/**/test_*.py")}
    existing = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py")}
    strange = {name for name in found if name.replace("test_", "", 1) not in existing}
    assert strange - TOPICS == set(), "rename them after the module that they test, or add them to TOPICS"
    assert TOPICS - strange == set(), "these topics are gone, or are modules"
