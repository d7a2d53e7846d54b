"""Makes a drafter from the names of a draft and a tree."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from aquiline.drafters.drafter import Drafter
from aquiline.drafters.lookup import SHARED_TOKENS, PromptLookup
from aquiline.drafters.mixed import LookupFirst
from aquiline.drafters.store import Store
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree, TreePolicy, names_tree, parse_tree, tree_text
from aquiline.drafters.tuned import TunedChoice, read_tuned
from aquiline.targets.target import Target, TargetShape

if TYPE_CHECKING:
    from aquiline.checkpoints.open import Head
    from aquiline.native.codes import WeightFormat

logger = logging.getLogger("aquiline")

CPU_TREE = Chain(depth=4, min_prob=0.15)
"""Small trees pay on a CPU, where every further node costs a fraction of a forward."""

CPU_TREE_EAGLE1 = Chain(depth=3, min_prob=0.2)
"""An EAGLE-1/2 head reads the target's whole LM head at every draft step: shorter chains."""

REPEATS = PromptLookup()
"""`draft="auto"` tries this before the head: it continues a repeated pair of tokens correctly about as often as the
head does (0.6 on MT-bench), at no cost; it also continues the head's drafts."""

GPU_TREE = DynamicTree(num_nodes=60, depth=7, top_k=10)
"""The papers' tree."""

Tree = TreePolicy | TunedChoice | str | Path
"""A tree, its text ("chain:4,0.15"), a file that tuning wrote, or what was read from one."""

_TREES: dict[str, tuple[type[TreePolicy], ...]] = {
    "prompt-lookup": (Chain,),
    "lookahead": (),
    "eagle": (Chain, StaticTree, DynamicTree),
    "eagle3": (Chain, StaticTree, DynamicTree),
    "medusa": (Chain, StaticTree),
    "hydra": (Chain, StaticTree),
    "small-model": (Chain,),
}
"""Draft, or kind of head → the trees that it can draft."""


def read_tree(tree: Tree | None) -> TreePolicy | TunedChoice | None:
    """Reads a tree from its text or from a tuned file; anything else is returned as it is.

    Raises:
        ValueError: neither a tree nor such a file.
    """
    if isinstance(tree, str) and names_tree(tree):
        return parse_tree(tree)
    if isinstance(tree, str | Path):
        return read_tuned(tree)
    if not isinstance(tree, Chain | StaticTree | DynamicTree | TunedChoice | None):
        raise ValueError(
            f"tree is {tree!r}; allowed: Chain, StaticTree, DynamicTree, a text like 'chain:4', a tuned file, or None"
        )
    return tree


def make_drafter(
    draft: str | Path | Drafter | None,
    tree: Tree | None,
    target: Target,
    path: Path | None,
    packed: bool = True,
) -> tuple[Drafter | None, str]:
    """Makes a drafter and its display name.

    Args:
        draft: "auto", "none", "prompt-lookup", "lookahead", the name, folder, GGUF file or hub id of a
            head (EAGLE, Medusa, Hydra, a small model), a drafter, or None.
        tree: shape of the drafts; None lets the device decide.
        target: the target.
        path: its folder, which tells which heads were trained for it; None where there is none.
        packed: use the draft network's fast CPU copy where the machine has its kernels.

    Raises:
        ValueError: an unknown name, a head that does not fit, a tree that the drafter cannot draft.
    """
    draft = None if draft == "none" else draft  # the command line's word for it
    tree = read_tree(tree)
    if isinstance(tree, TunedChoice) and draft is not None:
        draft, tree = _tuned(draft, tree, path)
        if draft is None:
            return None, "plain (tuned: plain)"
    if draft is None:
        if tree is not None:
            raise ValueError("a tree was given with draft=None, which drafts nothing; drop one of the two")
        return None, "plain"
    assert not isinstance(tree, TunedChoice)
    if not isinstance(draft, str | Path):
        if tree is not None:
            raise ValueError(f"a {type(draft).__name__} has its own tree settings; give them to it, not as tree")
        return draft, type(draft).__name__
    if draft == "auto":
        return _auto(tree, target, path, packed)
    if draft == "prompt-lookup":
        return _lookup(tree), "prompt lookup"
    if draft == "lookahead":
        from aquiline.drafters.lookahead import Lookahead

        _check_tree("lookahead", tree)
        return Lookahead(), "lookahead"
    from aquiline.checkpoints.open import open_head

    return head_drafter(open_head(draft, target.shape), tree, target, path, packed)


def with_shared_lookup(drafter: Drafter | None, name: str) -> tuple[Drafter, str]:
    """Adds lookup in earlier outputs to a drafter, in front of its own drafts; returns its display name too.

    Raises:
        ValueError: nothing drafts, or the drafter must see every step or samples.
    """
    if drafter is None:
        raise ValueError("shared_lookup is True, but draft is None, which drafts nothing; drop one of the two")
    shared = Store(limit=SHARED_TOKENS)
    if isinstance(drafter, PromptLookup):
        depth = drafter.depth
        return PromptLookup(depth, drafter.max_ngram, drafter.min_ngram, 1, shared), f"{name}, shared"
    if isinstance(drafter, LookupFirst):
        return LookupFirst(PromptLookup(shared=shared), drafter.other), f"{name}, shared"
    return LookupFirst(PromptLookup(shared=shared), drafter), f"{name} + shared prompt lookup"


def head_drafter(
    head: Head, tree: TreePolicy | None, target: Target, path: Path | None, packed: bool = True
) -> tuple[Drafter, str]:
    """Makes the drafter of an opened head, and its display name; arguments as `make_drafter`.

    Raises:
        ValueError: the head cannot draft the tree, or its tokens are not the target's.
    """
    from aquiline.checkpoints.open import trained_for
    from aquiline.checkpoints.parallel import StoredHeads

    _check_tree(head.kind, tree)
    # A small model drafts for whichever target has its tokens.
    if head.kind != "small-model" and path is not None and trained_for(head, path) is False:
        logger.warning(
            "the head in %s was trained for another target (fingerprints differ); drafts may rarely be accepted",
            head.path,
        )
    published = "published " if isinstance(head.contents, StoredHeads) and head.contents.published else ""
    name = f"{head.path.name} ({published}{head.kind.replace('-', ' ')})"
    if head.kind == "small-model":
        return _small_model(head, tree, target, path, packed), name
    if head.kind in ("medusa", "hydra"):
        return _parallel(head, tree, target), name
    return _eagle(head, tree, target, packed), name


def _tuned(
    draft: str | Path | Drafter, choice: TunedChoice, path: Path | None
) -> tuple[str | Path | Drafter | None, TreePolicy | None]:
    """The draft and tree of a tuned choice; a draft that the user named stays, unless plain decoding won."""
    from aquiline.models.resolve import target_fingerprint

    if path is not None and choice.target_fingerprint not in (None, target_fingerprint(path)):
        logger.warning("the tree was tuned on another target; run `aquiline tune` again for this one")
    if choice.draft is None:
        if draft != "auto":
            logger.warning(
                "draft %s has no effect: the tuned file chose plain decoding; leave the tree out to draft with it",
                draft,
            )
        return None, None
    return choice.draft if draft == "auto" else draft, choice.tree


def _auto(tree: TreePolicy | None, target: Target, path: Path | None, packed: bool) -> tuple[Drafter, str]:
    """A shipped head for this very target after prompt lookup; without one, prompt lookup alone."""
    from aquiline.checkpoints.open import open_head, shipped_for

    shipped = shipped_for(path)
    if not shipped:
        logger.info("no shipped head fits this target: drafting by prompt lookup")
        return _lookup(tree), "prompt lookup"
    # Without the target's folder: its fingerprint, a third of a second, was just compared.
    drafter, name = head_drafter(open_head(shipped[0], target.shape), tree, target, None, packed)
    return (LookupFirst(REPEATS, drafter), f"{name} + prompt lookup") if tree is None else (drafter, name)


def _check_tree(draft: str, tree: TreePolicy | None) -> None:
    """Raises ValueError unless the draft can take the tree."""
    allowed = _TREES[draft]
    if tree is None or isinstance(tree, allowed):
        return
    names = ", ".join(kind.__name__ for kind in allowed) or "none"
    hint = "; for other settings make a Lookahead(window, ngram, guesses)" if draft == "lookahead" else ""
    raise ValueError(f"tree is {tree_text(tree)}; allowed for {draft}: {names}, or None for its default{hint}")


def _lookup(tree: TreePolicy | None) -> PromptLookup:
    _check_tree("prompt-lookup", tree)
    if not isinstance(tree, Chain):
        return PromptLookup()
    if tree.min_prob:
        raise ValueError(f"tree is {tree_text(tree)}; allowed for prompt-lookup: no min_prob, it has no probabilities")
    return PromptLookup(depth=tree.depth)


def _eagle(head: Head, tree: TreePolicy | None, target: Target, packed: bool) -> Drafter:
    import torch

    from aquiline.checkpoints.eagle.stored import head_from_stored
    from aquiline.checkpoints.open import stored_eagle
    from aquiline.drafters.eagle import EagleDrafter

    if tree is None:
        on_cpu = target.device.type == "cpu"
        tree = GPU_TREE if not on_cpu else CPU_TREE if head.kind == "eagle3" else CPU_TREE_EAGLE1
    # Rounding a head to int8 changes its acceptance by less than chance, and reads half as much.
    form: WeightFormat | None = "int8" if target.dtype == torch.bfloat16 else None
    return EagleDrafter(head_from_stored(stored_eagle(head), target.dtype), target, tree, packed=packed, form=form)


def _parallel(head: Head, tree: TreePolicy | None, target: Target) -> Drafter:
    from aquiline.checkpoints.parallel import StoredHeads, heads_from_stored
    from aquiline.drafters.parallel import ParallelDrafter

    assert isinstance(head.contents, StoredHeads) and not isinstance(tree, DynamicTree)
    return ParallelDrafter(heads_from_stored(head.contents, target.dtype, target.device), target, tree)


def _small_model(head: Head, tree: TreePolicy | None, target: Target, path: Path | None, packed: bool) -> Drafter:
    from aquiline.drafters.small_model import SmallModel
    from aquiline.engine.opening import fast_form
    from aquiline.targets.loading import load_target, target_shape

    assert isinstance(tree, Chain | None)
    _compare_tokens(head.path, path, target_shape(head.path), target.shape)
    model = load_target(head.path, target.dtype, target.device)
    return SmallModel(fast_form(model, True) if packed else model, target, tree)


def _compare_tokens(draft: Path, target: Path | None, model: TargetShape, wanted: TargetShape) -> None:
    """Rejects a small model with another tokenizer: drafts would be legal tokens, and never accepted.

    A few tokens may differ, such as reserved ones that the target's training has named; a warning counts them.
    """
    from aquiline.models.tokenizer import token_table

    mine, theirs = (None if folder is None else token_table(folder) for folder in (draft, target))
    if mine is None or theirs is None:
        if model.vocab_size == wanted.vocab_size:
            return
        raise ValueError(
            f"{draft} has {model.vocab_size} tokens, the target {wanted.vocab_size}, and one of them has no "
            "tokenizer.json to compare; put it into the folder"
        )
    shared = [i for i in mine.keys() & theirs.keys() if i < min(model.vocab_size, wanted.vocab_size)]
    odd = [i for i in sorted(shared) if mine[i] != theirs[i]]
    if len(odd) > len(shared) // 100 or not shared:
        example = f" (token {odd[0]} is {mine[odd[0]]!r} there and {theirs[odd[0]]!r} here)" if odd else ""
        raise ValueError(
            f"{draft} has another tokenizer than the target{example}; give a small model with the target's: distil one "
            "with `aquiline train --method small-model`"
        )
    if odd:
        logger.warning("%d tokens of %s differ from the target's, such as %r", len(odd), draft, mine[odd[0]])
