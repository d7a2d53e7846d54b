"""Trees: their numbers are checked, and one language names them everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.trees import (
    EAGLE1_PATHS,
    Chain,
    DynamicTree,
    StaticTree,
    TreePolicy,
    parse_tree,
    sized,
    tree_text,
)
from aquiline.engine.drafting import make_drafter
from aquiline.loading import load
from tests import tiny
from tests.path_target import PathTarget

KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "chain": (lambda: Chain(1.5), r"chain depth is 1.5; allowed: an integer"),  # type: ignore[arg-type]
    "chain text": (lambda: Chain("4"), r"chain depth is '4'"),  # type: ignore[arg-type]
    "chain bool": (lambda: Chain(True), r"chain depth is True"),
    "chain probability": (lambda: Chain(2, "x"), r"min_prob is 'x'; allowed: a number"),  # type: ignore[arg-type]
    "static": (lambda: StaticTree(5), r"tree paths is 5; allowed: several tuples"),  # type: ignore[arg-type]
    "static path": (lambda: StaticTree(("a",)), r"tree path is 'a'; allowed: a tuple of ranks"),  # type: ignore[arg-type]
    "static rank": (lambda: StaticTree(((0,), (0, 0.5))), r"tree path rank is 0.5"),  # type: ignore[arg-type]
    "dynamic": (lambda: DynamicTree(6.5, 2, 3), r"num_nodes is 6.5; allowed: an integer ≥ 2"),  # type: ignore[arg-type]
    "dynamic none": (lambda: DynamicTree(6, None, 3), r"depth is None; allowed"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", KINDS)
def test_numbers_of_the_wrong_type(case: str) -> None:
    make, words = KINDS[case]
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("chain:5", Chain()),
        ("chain:4,0.15", Chain(4, 0.15)),
        ("static:0,1,0.0,0.1", StaticTree(((0,), (1,), (0, 0), (0, 1)))),
        ("dynamic:32,5,8", DynamicTree(32, 5, 8)),
        ("dynamic:32,5,8,1e-05", DynamicTree(32, 5, 8, 1e-5)),
    ],
)
def test_the_language_goes_both_ways(text: str, tree: TreePolicy) -> None:
    assert parse_tree(text) == tree and tree_text(tree) == text


@pytest.mark.parametrize(
    ("text", "levels", "cpu", "gpu"),
    [
        ("chain", None, Chain(5), Chain(5)),
        ("chain", 3, Chain(3), Chain(3)),
        ("static", None, StaticTree(), StaticTree()),
        ("static", 2, *[StaticTree(tuple(path for path in EAGLE1_PATHS if len(path) <= 2))] * 2),
        ("dynamic", None, DynamicTree(32, 5, 8), DynamicTree(60, 7, 10)),
        ("chain:7", 3, Chain(7), Chain(7)),
    ],
)
def test_bare_trees_suit_the_draft_and_the_device(text: str, levels: int | None, cpu: Any, gpu: Any) -> None:
    tree = parse_tree(text)
    assert tree_text(tree) == text
    assert [sized(tree, torch.device(name), levels) for name in ("cpu", "cuda")] == [cpu, gpu]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "is not a tree; allowed: chain") for text in ("", "bush:3", "chain:", "chain:4,0.1,2", "chain:x")),
        *((text, "is not a tree; allowed: chain") for text in ("chain:1_0", "chain:\uff14", "chain: 4", "chain:+4")),
        *((text, "is not a tree; allowed: .*dynamic") for text in ("dynamic:", "dynamic:10,2", "dynamic:10,x,2")),
        *(
            (text, "is not a tree; allowed: .*static")
            for text in ("static:", "static:0,a", "static:0,.1", "static:\u0660")
        ),
        ("chain:0", "chain depth is 0; allowed: ≥ 1"),
        ("chain:4,nan", "min_prob is nan"),
        ("static:0.0", r"path \(0, 0\) lacks its parent \(0,\); add it"),
        ("dynamic:500,2,3", "num_nodes 500 .* at most 13 nodes; lower num_nodes"),
    ],
)
def test_rejected_trees(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_tree(text)


def test_load_takes_the_language() -> None:
    for tree, depth in (("chain:7", 7), ("chain", 5), (Chain, 5), (None, 16)):
        loaded = load(tiny.hf_model("llama"), "prompt-lookup", tree=tree, adaptive=False)
        assert isinstance(loaded.drafter, PromptLookup) and loaded.drafter.depth == depth
    with pytest.raises(ValueError, match=r"'bush:3' is neither a tree nor a file; allowed: chain.*aquiline tune"):
        load("no such target", "prompt-lookup", tree="bush:3")  # before the target is looked for


@pytest.mark.parametrize(
    ("draft", "tree", "allowed"),
    [
        ("prompt-lookup", "static", "lookup: chain; leave"),
        ("prompt-lookup", "chain:4,0.1", "allowed for prompt-lookup: chain:4, without"),
        ("auto", "dynamic:8,2,3", "lookup: chain; leave"),
        ("lookahead", "chain:4", "lookahead: no tree; leave"),
        ("lookahead", "dynamic", "tree is dynamic; allowed for lookahead: no tree"),
        (None, "chain:4", "draft=None"),
        (PromptLookup(), "chain:4", "PromptLookup has its own tree settings"),
    ],
)
def test_a_tree_that_the_draft_cannot_draft(draft: Any, tree: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        make_drafter(draft, tree, PathTarget(11), None)
