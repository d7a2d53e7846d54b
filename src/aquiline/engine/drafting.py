"""From what a user names as a draft and a tree to a drafter."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aquiline.checkpoints.head_names import SHIPPED, resolve_head, shipped_head
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree, TreePolicy
from aquiline.drafters.tuned import read_tuned
from aquiline.targets.target import Target

if TYPE_CHECKING:
    import torch

__all__ = ["CPU_TREE", "CPU_TREE_EAGLE1", "GPU_TREE", "SHIPPED", "make_drafter"]

logger = logging.getLogger("aquiline")

CPU_TREE = Chain(depth=4, min_prob=0.15)
"""Small trees are what pays on a CPU: every further node costs a fraction of a forward."""

CPU_TREE_EAGLE1 = Chain(depth=3, min_prob=0.2)
"""An EAGLE-1/2 head reads the target's whole LM head at every draft step: shorter chains."""

REPEATS = PromptLookup()
"""What `draft="auto"` takes before it asks a head: a repeated pair of tokens is continued rightly
about as often as the head is right (0.6 on MT-bench), and it costs nothing."""

GPU_TREE = DynamicTree(num_nodes=60, depth=7, top_k=10)
"""The papers' tree."""


def make_drafter(
    draft: str | Path | Drafter | None,
    tree: TreePolicy | str | Path | None,
    target: Target,
    path: Path | None,
    packed: bool = True,
) -> tuple[Drafter | None, str]:
    """Makes what drafts, and names it.

    Args:
        draft: "auto", "none", "prompt-lookup", "lookahead", the name, folder, GGUF file or hub id of a
            head (EAGLE, Medusa, Hydra, a small model), a drafter, or None.
        tree: shape of the drafts, a file written by `aquiline tune`, or None for what pays here.
        target: the target.
        path: its folder, which tells which heads were trained for it; None where there is none.
        packed: use the draft network's fast CPU copy where the machine has its kernels.

    Raises:
        ValueError: an unknown name, a head that does not fit, a tree that the drafter cannot draft.
    """
    draft = None if draft == "none" else draft  # the command line's word for it
    if isinstance(tree, str | Path) and draft is not None:
        draft, tree = _tuned(draft, tree, path)
        if draft is None:
            return None, "plain (tuned: plain)"
    if draft is None:
        if tree is not None:
            raise ValueError("a tree was given with draft=None, which drafts nothing; drop one of the two")
        return None, "plain"
    if tree is not None and not isinstance(tree, Chain | StaticTree | DynamicTree):
        raise ValueError(f"tree is {tree!r}; allowed: Chain, StaticTree, DynamicTree, a tuned file, or None")
    if not isinstance(draft, str | Path):
        if tree is not None:
            raise ValueError(f"a {type(draft).__name__} has its own tree settings; give them to it, not as tree")
        return draft, type(draft).__name__
    if draft == "auto":
        head = shipped_head(path)
        if head is None:
            logger.info("no shipped head fits this target: drafting by prompt lookup")
        draft = "prompt-lookup"
        if head is not None:
            # Without the target's folder: its fingerprint, a third of a second, was just compared.
            drafter, name = _with_head(head, tree, target, None, packed)
            return (LookupFirst(REPEATS, drafter), f"{name} + prompt lookup") if tree is None else (drafter, name)
    if draft == "prompt-lookup":
        return _lookup(tree), "prompt lookup"
    if draft == "lookahead":
        return _lookahead(tree), "lookahead"
    return _with_head(resolve_head(draft), tree, target, path, packed)


def _tuned(
    draft: str | Path | Drafter, file: str | Path, path: Path | None
) -> tuple[str | Path | Drafter | None, TreePolicy | None]:
    """The draft and tree of a tuned file; a draft that was named by the user stays."""
    from aquiline.models.resolve import target_fingerprint

    choice = read_tuned(file)
    if path is not None and choice.target_fingerprint not in (None, target_fingerprint(path)):
        logger.warning("%s was tuned on another target; tune again for this one", file)
    if choice.draft is None:
        return None, None
    return choice.draft if draft == "auto" else draft, choice.tree


def _lookup(tree: TreePolicy | None) -> PromptLookup:
    if tree is not None and not isinstance(tree, Chain):
        raise ValueError(f"prompt lookup drafts chains; allowed: Chain(depth) or None, got {tree!r}")
    return PromptLookup(depth=tree.depth) if tree is not None else PromptLookup()


def _lookahead(tree: TreePolicy | None) -> Drafter:
    from aquiline.drafters.lookahead import Lookahead

    if tree is not None:
        raise ValueError("lookahead takes no tree; make a Lookahead(window, ngram, guesses) and give it as the draft")
    return Lookahead()


def _with_head(
    folder: Path, tree: TreePolicy | None, target: Target, path: Path | None, packed: bool
) -> tuple[Drafter, str]:
    from aquiline.checkpoints.final_heads import is_final_heads
    from aquiline.checkpoints.published_heads import published_kind

    if is_final_heads(_config(folder)) or published_kind(folder):
        return _parallel_heads(folder, tree, target, path)
    if _is_model(folder):
        return _small_model(folder, tree, target)
    return _eagle(folder, tree, target, path, packed)


def _config(folder: Path) -> dict[str, Any]:
    """config.json where it is readable; what is wrong with it is for the reader of the head to say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _is_model(folder: Path) -> bool:
    """Whether a folder holds a whole language model: a head never has the model's tensor names."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    try:
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                if "model.embed_tokens.weight" in tensors.keys():  # noqa: SIM118 - no mapping
                    return "fc.weight" not in tensors.keys()  # noqa: SIM118
    except (SafetensorError, OSError):
        pass  # the reader of the head says what is broken
    return False


def _eagle(
    folder: Path, tree: TreePolicy | None, target: Target, path: Path | None, packed: bool
) -> tuple[Drafter, str]:
    from aquiline.checkpoints.eagle.safeailab import read_head
    from aquiline.drafters.eagle import EagleDrafter

    head = read_head(folder, target.shape, target.dtype)
    _check_fingerprint(folder, head.target_fingerprint, path)
    if tree is None:
        tree = GPU_TREE if not _on_cpu(target.device) else CPU_TREE if head.config.kind == "eagle3" else CPU_TREE_EAGLE1
    return EagleDrafter(head, target, tree, packed=packed), f"{folder.name} ({head.config.kind})"


def _parallel_heads(folder: Path, tree: TreePolicy | None, target: Target, path: Path | None) -> tuple[Drafter, str]:
    from aquiline.checkpoints.final_heads import final_drafter
    from aquiline.checkpoints.published_heads import published_kind, read_published_heads
    from aquiline.drafters.parallel import ParallelDrafter

    if isinstance(tree, DynamicTree):
        raise ValueError(f"{folder} has heads that draft chains and static trees; allowed: Chain, StaticTree or None")
    kind = published_kind(folder)
    if kind is not None:
        heads = read_published_heads(folder, target.shape, target.dtype)
        heads.network.to(target.device)
        return ParallelDrafter(heads, target, tree), f"{folder.name} (published {kind})"
    drafter = final_drafter(folder, target, tree)
    _check_fingerprint(folder, drafter.heads.target_fingerprint, path)
    return drafter, f"{folder.name} ({drafter.heads.config.kind})"


def _small_model(folder: Path, tree: TreePolicy | None, target: Target) -> tuple[Drafter, str]:
    from aquiline.drafters.small_model import SmallModel
    from aquiline.targets.loading import load_target

    if tree is not None and not isinstance(tree, Chain):
        raise ValueError(f"a small model drafts chains; allowed: Chain(depth) or None, got {tree!r}")
    model = load_target(folder, target.dtype, target.device)
    return SmallModel(model, target, tree), f"{folder.name} (small model)"


def _check_fingerprint(folder: Path, recorded: str | None, path: Path | None) -> None:
    from aquiline.models.resolve import target_fingerprint

    if path is not None and recorded and recorded != target_fingerprint(path):
        logger.warning(
            "the head in %s was trained for another target (fingerprints differ); drafts may rarely be accepted", folder
        )


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"
