"""Finds the target features that an EAGLE-3 head reads, in either of two conventions that differ by one.

Boundaries (vLLM, speculators, llama.cpp, this project): id k is the residual stream *entering*
layer k. Outputs (ModelOpt, SpecForge, SGLang): id k is what layer k returns, the stream entering
layer k + 1. The same three places of an n-layer target are called::

    boundaries   2   n//2       n−3
    outputs      1   n//2 − 1   n−4

Source: SGLang pull requests 25454 and 32334 for what a list inside `eagle_config` means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aquiline.targets.target import Feature, eagle3_layers

_KEY = "eagle_aux_hidden_state_layer_ids"


def resolve_layer_ids(
    config: Mapping[str, Any], num_layers: int | None, place: str, convention: str | None = None
) -> tuple[tuple[Feature, ...], str]:
    """Finds the features that a configuration names, as boundaries.

    A list at the top level holds boundaries. A list inside `eagle_config` holds outputs if its
    first id is 1, as in the default of the stacks that write it; otherwise boundaries.

    Args:
        num_layers: n of the target, or None if unknown.
        place: where the configuration was read, for messages.
        convention: "boundary" or "output" to override this.

    Returns:
        The boundaries in the order in which the head's fc reads them, and how they were found, as text.

    Raises:
        ValueError: if ids are not integers, repeat, or lie outside the target.
    """
    if convention not in (None, "boundary", "output"):
        raise ValueError(f"layer-id convention {convention!r} is not known; allowed: boundary, output")
    ids, where = _named(config, place)
    if ids is None:
        if num_layers is None:
            return ("low", "middle", "high"), "not named: the target's layers 2, n//2, n−3"
        return eagle3_layers(num_layers), f"not named: the default 2, n//2, n−3 of {num_layers} layers"
    if convention is None:
        convention = "output" if where == "eagle_config" and ids[0] == 1 else "boundary"
    features = tuple(i + (convention == "output") for i in ids)
    if num_layers is not None and not all(0 <= f <= num_layers for f in features):
        raise ValueError(
            f"{place}: {_KEY} {ids} read as {convention} ids exceed the target's {num_layers} layers; "
            "is it another target, or the other convention?"
        )
    return features, f"{where} ids {ids} read as {convention} ids"


def _named(config: Mapping[str, Any], place: str) -> tuple[list[int] | None, str]:
    """Returns the checked ids, if any, and the part of the configuration that holds them."""
    top, inner = config.get(_KEY), (config.get("eagle_config") or {}).get(_KEY)
    for ids in (top, inner):
        if ids is not None:
            _check(ids, place)
    if top and inner and top != inner:
        raise ValueError(
            f"{place}: {_KEY} is {top} at the top level and {inner} inside eagle_config; engines read either, "
            "keep the one that the head was trained with"
        )
    return top or inner, "top level" if top else "eagle_config"


def looks_like_outputs(features: tuple[Feature, ...], num_layers: int) -> bool:
    """True if the boundaries are one below the default, so that they are probably output ids."""
    return num_layers >= 7 and features == tuple(k - 1 for k in eagle3_layers(num_layers))


def _check(ids: Any, place: str) -> None:
    whole = isinstance(ids, list) and bool(ids) and all(type(i) is int and i >= 0 for i in ids)
    if not whole or len(set(ids)) != len(ids):
        raise ValueError(
            f"{place}: config.json says {_KEY} = {ids!r}, expected a list of different layer numbers, or no such key "
            "for the target's layers 2, n//2, n−3"
        )
