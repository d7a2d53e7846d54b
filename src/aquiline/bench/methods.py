"""Parses methods such as `eagle3:chain:4`, and builds them on a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aquiline.checkpoints.open import SHIPPED, Head, open_head, shipped_for
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import Merged
from aquiline.drafters.trees import BareTree, Chain, DynamicTree, StaticTree, TreePolicy, tree_text
from aquiline.drafters.tuned import TunedChoice
from aquiline.engine.drafting import make_drafter, read_tree
from aquiline.targets.cost import step_costs
from aquiline.targets.target import Target

METHODS = {
    "plain": "decoding without drafts, in the same engine",
    "hf": "`generate` of transformers on the same weights",
    "auto": "load()'s default, with its fall-back to plain",
    "prompt-lookup": "continuations of repeated n-grams; settings depth, max_ngram, min_ngram, num_branches",
    "lookahead": "Jacobi window and n-gram pool; settings window, ngram, guesses",
    "small-model": "a small model drafts a chain; setting sampled",
    "medusa": "parallel heads and their static tree",
    "hydra": "sequentially dependent heads and their static tree",
    "eagle": "EAGLE-1 head; static tree unless told otherwise",
    "eagle2": "EAGLE-1 head; dynamic tree unless told otherwise",
    "eagle3": "EAGLE-3 head; load()'s default tree unless told otherwise",
    "eagle3+lookup": "prompt lookup merged into an EAGLE-3 tree",
}
"""Name → description. All but plain, hf and lookahead take a tree as `--tree` does."""

HEAD_OF = {
    "eagle": "eagle",
    "eagle2": "eagle",
    "eagle3": "eagle3",
    "eagle3+lookup": "eagle3",
    "medusa": "medusa",
    "hydra": "hydra",
    "small-model": "small-model",
}
"""Method → kind of head that it needs."""

SETTINGS = {
    "prompt-lookup": ("depth", "max_ngram", "min_ngram", "num_branches"),
    "lookahead": ("window", "ngram", "guesses"),
    "small-model": ("sampled",),
}
"""Method → its settings, all integers."""

_TREES: dict[str, BareTree] = {"eagle": StaticTree, "eagle2": DynamicTree}
"""Methods whose default tree is not that of `load`."""


@dataclass(frozen=True)
class MethodSpec:
    """A parsed method.

    Attributes:
        label: as given; names the method in all results.
        name: key of `METHODS`.
        tree: as `read_tree` returns it; None: the method's default.
        settings: name → value.
    """

    label: str
    name: str
    tree: TreePolicy | BareTree | TunedChoice | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Bed:
    """The parts that all methods of a run share.

    Attributes:
        target: the target, as `load` decodes with it.
        tokenizer: of the target.
        end_ids: its end-of-sequence tokens.
        path: folder of its weights, or None.
        name: the user's name for it.
        heads: kind of head → folder, for heads that do not ship.
    """

    target: Target
    tokenizer: Any
    end_ids: tuple[int, ...]
    path: Path | None
    name: str
    heads: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Method:
    """A method ready to run.

    Attributes:
        label: its name in all results.
        drafter: None for plain decoding and for `generate` of transformers.
        settings: its tree, or other settings.
        head: where its head came from, or None.
        chain: it drafts chains, so that n-α is defined.
        hf_model: transformers' model, for the method "hf" alone.
    """

    label: str
    drafter: Drafter | None
    settings: str
    head: str | None = None
    chain: bool = False
    hf_model: Any = None


def parse_method(text: str) -> MethodSpec:
    """Parses ``NAME[:TREE][:SETTING=VALUE]…``; the tree is anything that `--tree` accepts.

    Raises:
        ValueError: for an unknown method (lists them all), tree or setting.
    """
    label = text.strip()
    name, *parts = label.split(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; allowed: {', '.join(METHODS)}")
    if "" in parts:
        raise ValueError(f"{text!r} has an empty part after a colon; leave the colon out or give a tree or a setting")
    pairs = [part.partition("=")[::2] for part in parts if part.partition("=")[0].isidentifier() and "=" in part]
    tree = ":".join(part for part in parts if part.partition("=")[::2] not in pairs)
    if tree and name in ("plain", "hf"):
        raise ValueError(f"{text!r}: {name} takes no tree; give {name} alone")
    settings: dict[str, int] = {}
    for key, value in pairs:
        if key not in SETTINGS.get(name, ()):
            other = f"a tree, as in {name}:chain:4" if name in HEAD_OF else f"{name} alone"
            allowed = ", ".join(SETTINGS.get(name, ())) or other
            raise ValueError(f"{text!r}: {key} is not a setting of {name}; allowed: {allowed}")
        if key in settings:
            raise ValueError(f"{text!r}: {key} is given twice; give it once")
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"{text!r}: {key} is {value!r}; allowed: an integer ≥ 0")
        settings[key] = int(value)
    if tree and settings and name != "small-model":
        raise ValueError(f"{text!r} has a tree and settings; allowed for {name}: one of the two")
    try:
        return MethodSpec(label, name, read_tree(tree) if tree else None, settings)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error


def make_method(spec: MethodSpec, bed: Bed) -> Method:
    """Builds a method on a target.

    Raises:
        ValueError: it lacks its head (names the command that trains one), or cannot draft its tree.
    """
    label, name, tree = spec.label, spec.name, spec.tree
    if name == "plain":
        return Method(label, None, "no drafts")
    if name == "hf":
        return _hf(spec, bed)
    if name in ("prompt-lookup", "lookahead") and tree is None:
        free = PromptLookup(**spec.settings) if name == "prompt-lookup" else Lookahead(**spec.settings)
        words = ", ".join(f"{key}={getattr(free, key)}" for key in SETTINGS[name])
        return Method(label, free, words, chain=getattr(free, "num_branches", 0) == 1)
    head = find_head(name, bed) if name in HEAD_OF else None
    sampled = bool(spec.settings.get("sampled"))
    made = make_drafter(head or name, tree or _TREES.get(name), bed.target, bed.path, sampled=sampled)
    drafter, words = made.drafter, made.name if made.tree is None else tree_text(made.tree)
    chain = isinstance(made.tree, Chain)
    if name == "auto":
        words = f"{made.name}, {words}"
    if drafter is not None and name == "auto" and tree is None:
        drafter, words, chain = Adaptive(drafter, step_costs(bed.target)), f"{words}, what pays of it", False
    elif drafter is not None and name == "eagle3+lookup":
        drafter, words, chain = Merged(drafter, PromptLookup()), f"{words} + prompt lookup", False
    return Method(label, drafter, words, None if head is None else shown(head), chain)


def shown(head: Head) -> str:
    """Returns a head's name if it ships, which holds on other machines too, else its path."""
    return head.path.name if head.path.parent == SHIPPED else str(head.path)


def find_head(method: str, bed: Bed) -> Head:
    """Opens a method's head: the user's, else one that ships for exactly this target.

    Raises:
        ValueError: there is none (names the command that trains one), or the user's is of another kind.
    """
    kind = HEAD_OF[method]
    if kind in bed.heads:
        head = open_head(bed.heads[kind], bed.target.shape)
        if head.kind != kind:
            raise ValueError(
                f"method {method} needs a head of kind {kind!r}, and {head.path} is of kind {head.kind!r}; give it as "
                f"--head {head.kind}={head.path}"
            )
        return head
    for folder in shipped_for(bed.path):
        head = open_head(folder, bed.target.shape)
        if head.kind == kind:
            return head
    raise ValueError(
        f"method {method} needs a head of kind {kind!r} for {bed.name}, and none ships; train one: "
        f"`aquiline train DATA --method {kind} --target {bed.name} --output FOLDER` "
        f"(DATA comes from `aquiline prepare`), then give --head {kind}=FOLDER"
    )


def _hf(spec: MethodSpec, bed: Bed) -> Method:
    from aquiline.bench.hf_generate import load_hf

    if bed.path is None:
        raise ValueError("method hf loads the target's folder again with transformers, and this target has none")
    model = load_hf(bed.path, bed.target.dtype, bed.target.device)
    return Method(spec.label, None, "transformers", hf_model=model)


def check_methods(labels: Sequence[str]) -> list[MethodSpec]:
    """Parses all labels, and puts plain decoding first, since everything is measured against it.

    Raises:
        ValueError: for an unknown or repeated method.
    """
    specs = [parse_method(label) for label in labels]
    if len({spec.label for spec in specs}) < len(specs):
        raise ValueError(f"a method is given twice: {', '.join(labels)}")
    plain = [spec for spec in specs if spec.name == "plain"] or [MethodSpec("plain", "plain")]
    return [*plain, *(spec for spec in specs if spec.name != "plain")]
