"""Methods by name: what `--methods eagle3:chain:4` means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aquiline.checkpoints.open import SHIPPED, Head, open_head, shipped_for
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst, Merged
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree, TreePolicy, parse_tree
from aquiline.engine.drafting import GPU_TREE, head_drafter, make_drafter
from aquiline.targets.target import Target

METHODS = {
    "plain": "decoding without drafts, in the same engine",
    "hf": "`generate` of transformers on the same weights",
    "auto": "what load() takes by default, with its fall-back to plain",
    "prompt-lookup": "continuations of repeated n-grams; options depth, max_ngram, min_ngram, num_branches",
    "lookahead": "Jacobi window and n-gram pool; options window, ngram, guesses",
    "small-model": "a small model drafts a chain; option sampled",
    "medusa": "parallel heads and their static tree",
    "hydra": "sequentially dependent heads and their static tree",
    "eagle": "EAGLE-1 head; static tree unless told otherwise",
    "eagle2": "EAGLE-1 head; dynamic tree unless told otherwise",
    "eagle3": "EAGLE-3 head; load()'s default tree unless told otherwise",
    "eagle3+lookup": "prompt lookup merged into an EAGLE-3 tree",
}
"""Name → what it is. Those with a head take a tree as `--tree` does, or :dynamic for what pays on the device."""

CPU_DYNAMIC = DynamicTree(num_nodes=32, depth=5, top_k=8)
"""The dynamic tree on a CPU, where each further node costs; on a GPU the papers' 60 nodes."""

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


@dataclass(frozen=True)
class MethodSpec:
    """A parsed method.

    Attributes:
        label: as given; names the method in all results.
        name: key of `METHODS`.
        tree: as `--tree` takes it, "dynamic" for the device's dynamic tree, or "" for the method's own default.
        options: (setting, value) pairs.
    """

    label: str
    name: str
    tree: str = ""
    options: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Bed:
    """What all methods of a run share.

    Attributes:
        target: the target, as `load` decodes with it.
        tokenizer: of the target.
        end_ids: its end-of-sequence tokens.
        path: folder of its weights, or None.
        name: what the user called it.
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
        settings: tree or other settings, in words.
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
    """Parses ``NAME[:TREE][:SETTING=VALUE]…``.

    Raises:
        ValueError: for an unknown method (lists what there is), tree or setting.
    """
    name, *parts = text.strip().split(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; allowed: {', '.join(METHODS)}")
    if "" in parts:
        raise ValueError(f"{text!r} has an empty part after a colon; leave the colon out or give a tree or a setting")
    tree = ":".join(part for part in parts if "=" not in part)
    options: list[tuple[str, float]] = []
    for setting, _, value in (part.partition("=") for part in parts if "=" in part):
        if any(setting == known for known, _ in options):
            raise ValueError(f"{text!r}: {setting} is given twice")
        try:
            options.append((setting, float(value) if "." in value else int(value)))
        except ValueError as error:
            raise ValueError(f"{text!r}: {setting} is {value!r}; allowed: a number") from error
    if tree and name not in HEAD_OF:
        raise ValueError(f"{text!r}: {name} takes no tree")
    if tree and tree != "dynamic":
        try:
            parse_tree(tree)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from error
    if options and name not in ("prompt-lookup", "lookahead", "small-model"):
        form = f"{name}:chain:4" if name in HEAD_OF else name
        raise ValueError(f"{text!r}: {name} has no settings; allowed: {name} alone or {form}")
    return MethodSpec(text.strip(), name, tree, tuple(options))


def make_method(spec: MethodSpec, bed: Bed) -> Method:
    """Builds a method on a target.

    Raises:
        ValueError: it lacks its head (names the command that trains one), or its settings make
            no tree.
    """
    if spec.name == "plain":
        return Method(spec.label, None, "no drafts")
    if spec.name == "hf":
        return _hf(spec, bed)
    if spec.name == "auto":
        drafter, name = make_drafter("auto", None, bed.target, bed.path)
        assert drafter is not None
        return Method(spec.label, Adaptive(drafter), f"{name}, {_described(drafter)}, adaptive")
    if spec.name == "prompt-lookup":
        lookup = _with_options(PromptLookup, spec)
        return Method(spec.label, lookup, _described(lookup), chain=lookup.num_branches == 1)
    if spec.name == "lookahead":
        from aquiline.drafters.lookahead import Lookahead

        ahead = _with_options(Lookahead, spec)
        return Method(spec.label, ahead, _described(ahead))
    head = find_head(spec.name, bed)
    drafter = _with_head(spec, bed, head)
    policy = getattr(drafter, "policy", None)
    shown = head.path.name if head.path.parent == SHIPPED else str(head.path)
    return Method(spec.label, drafter, _described(drafter), shown, isinstance(policy, Chain))


def find_head(method: str, bed: Bed) -> Head:
    """A method's head: the user's, else one that ships for this very target.

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
    model = load_hf(bed.path, bed.target.dtype, torch.device(bed.target.device))
    return Method(spec.label, None, "transformers", hf_model=model)


def _with_head(spec: MethodSpec, bed: Bed, head: Head) -> Drafter:
    defaults: dict[str, TreePolicy] = {"eagle": StaticTree(), "eagle2": _dynamic(bed)}
    drafter, _ = head_drafter(head, _tree(spec, bed) or defaults.get(spec.name), bed.target, bed.path)
    if isinstance(drafter, SmallModel):
        return SmallModel(drafter.model, bed.target, drafter.policy, sampled=_sampled(spec))
    if spec.name == "eagle3+lookup":
        return Merged(drafter, PromptLookup())
    return drafter


def _sampled(spec: MethodSpec) -> bool:
    options = dict(spec.options)
    unknown = sorted(options.keys() - {"sampled"})
    if unknown:
        raise ValueError(f"{spec.label!r}: {unknown[0]} is not a setting of small-model; allowed: sampled")
    return bool(options.get("sampled", 0))


def _dynamic(bed: Bed) -> DynamicTree:
    return CPU_DYNAMIC if torch.device(bed.target.device).type == "cpu" else GPU_TREE


def _tree(spec: MethodSpec, bed: Bed) -> TreePolicy | None:
    """The tree that the specification names, or None for the default."""
    if spec.tree == "dynamic":
        return _dynamic(bed)
    return parse_tree(spec.tree) if spec.tree else None


def _with_options(make: Callable[..., Any], spec: MethodSpec) -> Any:
    try:
        return make(**dict(spec.options))
    except TypeError as error:
        raise ValueError(f"{spec.label!r}: {error}") from error


def _described(drafter: Any) -> str:
    """Settings in words, for the report."""
    if isinstance(drafter, LookupFirst):
        return f"lookup ({_described(drafter.lookup)}), else {_described(drafter.other)}"
    if isinstance(drafter, Merged):
        return f"{_described(drafter.first)} + lookup ({_described(drafter.second)})"
    policy = getattr(drafter, "policy", None)
    if isinstance(policy, StaticTree):
        return f"static tree of {len(policy.paths)} nodes"
    if policy is not None:
        return str(policy)
    names = ("depth", "max_ngram", "min_ngram", "num_branches", "window", "ngram", "guesses")
    given = {name: getattr(drafter, name) for name in names if hasattr(drafter, name)}
    return ", ".join(f"{name}={value}" for name, value in given.items())


def check_methods(labels: Sequence[str]) -> list[MethodSpec]:
    """Parses all labels and puts plain decoding, which everything is measured against, first.

    Raises:
        ValueError: for an unknown or repeated method.
    """
    specs = [parse_method(label) for label in labels]
    if len({spec.label for spec in specs}) < len(specs):
        raise ValueError(f"a method is given twice: {', '.join(labels)}")
    plain = [spec for spec in specs if spec.name == "plain"] or [MethodSpec("plain", "plain")]
    return [*plain, *(spec for spec in specs if spec.name != "plain")]
