"""Makes a drafter from the names of a draft and a tree."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from aquiline.checkpoints.eagle.stored import head_from_stored
from aquiline.checkpoints.open import Head, open_head, shipped_for, stored_eagle, stored_heads, trained_for
from aquiline.checkpoints.parallel import heads_from_stored
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.lookup import SHARED_TOKENS, PromptLookup
from aquiline.drafters.mixed import LookupFirst
from aquiline.drafters.parallel import ParallelDrafter
from aquiline.drafters.small_model import SmallModel, compare_tokens
from aquiline.drafters.store import OTHER_BELIEFS, Store
from aquiline.drafters.trees import (
    BareTree,
    Chain,
    DynamicTree,
    StaticTree,
    TreePolicy,
    names_tree,
    parse_tree,
    sized,
    tree_text,
)
from aquiline.drafters.tuned import TunedChoice, read_tuned
from aquiline.engine.opening import fast_form
from aquiline.models.resolve import target_fingerprint
from aquiline.native.codes import WeightFormat
from aquiline.targets.loading import load_target, target_shape
from aquiline.targets.target import Target

logger = logging.getLogger("aquiline")

CPU_TREE = {"eagle": Chain(depth=3, min_prob=0.2), "eagle3": Chain(depth=4, min_prob=0.15)}
"""Kind of head → its default on a CPU, where small trees pay because every further node costs a fraction of a forward.
An EAGLE-1/2 head reads the target's whole LM head at every draft step: shorter chains."""

Tree = TreePolicy | BareTree | TunedChoice | str | Path
"""A tree, its text ("chain:4,0.15"), a file that tuning wrote, or what was read from one."""

_TREES: dict[str, tuple[BareTree, ...]] = {
    "prompt-lookup": (Chain,),
    "lookahead": (),
    "eagle": (Chain, StaticTree, DynamicTree),
    "eagle3": (Chain, StaticTree, DynamicTree),
    "medusa": (Chain, StaticTree),
    "hydra": (Chain, StaticTree),
    "small-model": (Chain,),
}
"""Draft, or kind of head → the trees that it can draft."""


@dataclass(eq=False)
class ServedHead:
    """An EAGLE head that drafts, by itself or in a wrapper, and that another one can replace.

    Attributes:
        path: folder or file of the head that drafts now; `swap_head` changes it.
        packed: it drafts with a fast copy of its network.
    """

    drafter: EagleDrafter
    path: Path
    packed: bool


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter and how to display it.

    Attributes:
        drafter: None for plain decoding.
        name: what drafts, for display.
        tree: the tree that it drafts, a wrapped head's among them; None where it has none.
        head: the EAGLE head that drafts, a wrapped one among them; None where there is none.
    """

    drafter: Drafter | None
    name: str
    tree: TreePolicy | None = None
    head: ServedHead | None = None


def read_tree(tree: Tree | None) -> TreePolicy | BareTree | TunedChoice | None:
    """Reads a tree from its text or from a tuned file; anything else is returned as it is.

    Raises:
        ValueError: neither a tree nor such a file.
    """
    if isinstance(tree, str) and names_tree(tree):
        return parse_tree(tree)
    if isinstance(tree, str | Path):
        return read_tuned(tree)
    if not isinstance(tree, TreePolicy | TunedChoice | None) and tree not in (Chain, StaticTree, DynamicTree):
        raise ValueError(
            f"tree is {tree!r}; allowed: Chain, StaticTree, DynamicTree, a text like 'chain:4', a tuned file, or None"
        )
    return tree


def make_drafter(
    draft: str | Path | Head | Drafter | None,
    tree: Tree | None,
    target: Target,
    path: Path | None,
    packed: bool = True,
    *,
    shared_lookup: bool = False,
    sampled: bool = False,
) -> NamedDrafter:
    """Makes a drafter.

    Args:
        draft: "auto", "none", "prompt-lookup", "lookahead", a head (EAGLE, Medusa, Hydra, a small model) by its name,
            folder, GGUF file or hub id, an opened head, a drafter, or None.
        tree: shape of the drafts; None lets the device decide.
        target: the target.
        path: its folder, which tells which heads were trained for it; None where there is none.
        packed: use the draft network's fast CPU copy where the machine has its kernels.
        shared_lookup: look up drafts in earlier outputs first.
        sampled: of a small model, see `SmallModel`.

    Raises:
        ValueError: an unknown name, a head that does not fit, a tree that the drafter cannot draft.
    """
    draft, shape, name = _chosen(draft, read_tree(tree), path)
    if draft is None:
        if shared_lookup:
            raise ValueError("shared_lookup is True, but draft is None, which drafts nothing; drop one of the two")
        return NamedDrafter(None, name)
    store = Store(limit=SHARED_TOKENS, beliefs=OTHER_BELIEFS) if shared_lookup else None
    auto = draft == "auto"
    if auto:
        # Without the target's folder: its fingerprint, a third of a second, was just compared.
        draft, path = _shipped(path), None
    if draft == "prompt-lookup":
        return _lookup(shape, target, store)
    made = _alone(draft, shape, target, path, packed, sampled)
    return _after_lookup(made, store) if shared_lookup or (auto and shape is None) else made


def _chosen(
    draft: str | Path | Head | Drafter | None, tree: TreePolicy | BareTree | TunedChoice | None, path: Path | None
) -> tuple[str | Path | Head | Drafter | None, TreePolicy | BareTree | None, str]:
    """Returns draft and tree, those of a tuned file resolved, and the name of plain decoding.

    A draft that the user named replaces the file's, unless plain decoding won.
    """
    if draft is None or draft == "none":  # the command line's word for it
        if tree is not None:
            raise ValueError("a tree was given with draft=None, which drafts nothing; drop one of the two")
        return None, None, "plain"
    if not isinstance(tree, TunedChoice):
        return draft, tree, ""
    if path is not None and tree.target_fingerprint not in (None, target_fingerprint(path)):
        logger.warning("the tree was tuned on another target; run `aquiline tune` again for this one")
    if tree.draft is not None:
        return tree.draft if draft == "auto" else draft, tree.tree, ""
    if draft != "auto":
        logger.warning(
            "draft %s has no effect: the tuned file chose plain decoding; leave the tree out to draft with it",
            draft.path if isinstance(draft, Head) else draft,
        )
    return None, None, "plain (tuned: plain)"


def _after_lookup(made: NamedDrafter, store: Store | None) -> NamedDrafter:
    """Puts prompt lookup first.

    It continues a repeated pair of tokens correctly about as often as a head does (0.6 on MT-bench), at no cost, and
    also continues the head's drafts.
    """
    assert made.drafter is not None
    drafter = LookupFirst(PromptLookup(shared=store), made.drafter)
    name = f"{made.name} + {'' if store is None else 'shared '}prompt lookup"
    return NamedDrafter(drafter, name, made.tree, made.head)


def _shipped(path: Path | None) -> str | Path:
    """Returns the best head that ships for the target in a folder, else prompt lookup."""
    shipped = shipped_for(path)
    if not shipped:
        logger.info("no shipped head fits this target: drafting by prompt lookup")
    return shipped[0] if shipped else "prompt-lookup"


def _alone(
    draft: str | Path | Head | Drafter,
    tree: TreePolicy | BareTree | None,
    target: Target,
    path: Path | None,
    packed: bool,
    sampled: bool,
) -> NamedDrafter:
    """Makes any drafter but prompt lookup."""
    if draft == "lookahead":
        _check_tree("lookahead", tree)
        return NamedDrafter(Lookahead(), "lookahead")
    if isinstance(draft, str | Path):
        draft = open_head(draft, target.shape)
    if not isinstance(draft, Head):
        if tree is not None:
            raise ValueError(f"a {type(draft).__name__} has its own tree settings; give them to it, not as tree")
        return NamedDrafter(draft, type(draft).__name__)
    _check_tree(draft.kind, tree)
    # A small model drafts for whichever target has its tokens.
    if draft.kind != "small-model" and path is not None and trained_for(draft, path) is False:
        logger.warning(
            "the head in %s was trained for another target (fingerprints differ); drafts may rarely be accepted",
            draft.path,
        )
    drafter = _of_head(draft, tree, target, path, packed, sampled)
    heads = stored_heads(draft)
    published = "published " if heads is not None and heads.published else ""
    head = ServedHead(drafter, draft.path, packed) if isinstance(drafter, EagleDrafter) else None
    return NamedDrafter(drafter, f"{draft.path.name} ({published}{draft.kind.replace('-', ' ')})", drafter.policy, head)


def swap_head(served: ServedHead, folder: Path, lock: threading.RLock) -> None:
    """Drafts with another head from the next step on, in requests that run, too; no output changes.

    Args:
        folder: a head of the same sizes and vocabulary.
        lock: of the engine.

    Raises:
        ValueError: a head that does not fit.
    """
    old = served.drafter
    made = make_drafter(folder, old.policy, old.target, None, served.packed).head
    if made is None:
        raise ValueError(f"{folder} is no EAGLE head; allowed: one of the same sizes as {served.path}")
    with lock:
        old.become(made.drafter)
        served.path = made.path


def _check_tree(draft: str, tree: TreePolicy | BareTree | None) -> None:
    """Raises ValueError unless the draft can take the tree."""
    allowed = _TREES[draft]
    if tree is None or (tree if isinstance(tree, type) else type(tree)) in allowed:
        return
    names = " or ".join(map(tree_text, allowed)) or "no tree"
    raise ValueError(f"tree is {tree_text(tree)}; allowed for {draft}: {names}; leave it out for the default")


def _lookup(tree: TreePolicy | BareTree | None, target: Target, shared: Store | None) -> NamedDrafter:
    _check_tree("prompt-lookup", tree)
    name = "prompt lookup" if shared is None else "prompt lookup, shared"
    if tree is None:
        drafter = PromptLookup(shared=shared)
        return NamedDrafter(drafter, name, Chain(drafter.depth))
    policy = sized(tree, target.device)
    assert isinstance(policy, Chain)
    if policy.min_prob:
        raise ValueError(
            f"tree is {tree_text(policy)}; allowed for prompt-lookup: chain:{policy.depth}, without MIN_PROB"
        )
    return NamedDrafter(PromptLookup(policy.depth, shared=shared), name, policy)


def _of_head(
    head: Head, tree: TreePolicy | BareTree | None, target: Target, path: Path | None, packed: bool, sampled: bool
) -> EagleDrafter | ParallelDrafter | SmallModel:
    heads = stored_heads(head)
    levels = None if heads is None else heads.config.num_heads
    policy = None if tree is None else sized(tree, target.device, levels)
    if heads is not None:
        assert not isinstance(policy, DynamicTree)
        return ParallelDrafter(heads_from_stored(heads, target.dtype, target.device), target, policy)
    if head.kind == "small-model":
        assert isinstance(policy, Chain | None)
        compare_tokens(head.path, path, target_shape(head.path), target.shape)
        model = load_target(head.path, target.dtype, target.device)
        model = fast_form(model, True) if packed else model
        return SmallModel(model, target, policy, gamma=head.report.gamma, sampled=sampled)
    if policy is None:
        policy = CPU_TREE[head.kind] if target.device.type == "cpu" else DynamicTree()
    # Rounding a head to int8 changes its acceptance by less than chance, and reads half as much.
    form: WeightFormat | None = "int8" if target.dtype == torch.bfloat16 else None
    return EagleDrafter(head_from_stored(stored_eagle(head), target.dtype), target, policy, packed=packed, form=form)
