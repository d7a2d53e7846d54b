"""Adds and reads options shared by several subcommands."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import typing
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aquiline.engine.request import GenerationOutput
    from aquiline.loading import Loaded
    from aquiline.sampling import LossyRule, SamplingParams

logger = logging.getLogger("aquiline")

_STATS = (
    "prompt_tokens", "emitted", "steps", "nodes", "accepted", "mean_accept_length", "acceptance_rate",
    "tokens_per_second", "seconds", "sources", "lossy",
)  # fmt: skip
"""Counters and rates of an output's JSON object."""


def add_target_option(parser: Any) -> None:
    """Adds --target."""
    parser.add_argument("--target", default="smollm2", help="alias, folder, GGUF file or hub id (default: smollm2)")


def add_machine_options(parser: Any) -> None:
    """Adds --dtype, --device and --threads."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64", "int8", "int4"),
        help="dtype of the weights; int8 and int4 quantise them (default: bfloat16 or float32, the faster here)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (≥ 1; default: PyTorch's choice)")


def add_setting_options(group: Any, settings: type[Any], names: Collection[str]) -> None:
    """Adds an option for each of some settings; its help is the setting's meaning.

    An option that was not given is None, so that a default is written in one place: the dataclass.

    Args:
        settings: a dataclass whose fields are made by `aquiline.checks.setting`.
    """
    from aquiline.checks import explanation, meanings

    hints = typing.get_type_hints(settings)
    for name, (each, meaning) in meanings(settings).items():
        if name not in names:
            continue
        flag, text = f"--{(meaning.flag or name).replace('_', '-')}", explanation(each, meaning).replace("%", "%%")
        kind, repeated = _kind(hints[name])
        if kind is bool:
            group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
            continue
        more: dict[str, Any] = {"nargs": "+", "action": "extend"} if repeated else {}
        more |= {"choices": meaning.choices} if meaning.choices else {"metavar": "VALUE" if kind is str else "N"}
        group.add_argument(flag, dest=name, type=kind, help=text, **more)


def _kind(hint: Any) -> tuple[Any, bool]:
    """Returns the type of an annotation's single values (int, float, str or bool), and True if it holds several."""
    parts = [part for part in typing.get_args(hint) if part not in (type(None), Ellipsis)]
    if typing.get_origin(hint) is tuple:
        return _kind(parts[0])[0], True
    if parts:
        return _kind(parts[0])
    return integer_of if hint is int else hint, False


def integer_of(text: str) -> int:
    """Parses an integer as people write it: 200000, 200_000 or 2e5.

    Raises:
        ValueError: for anything else, including fractions.
    """
    value = float(text) if "e" in text else int(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def given_settings(arguments: argparse.Namespace, settings: type[Any]) -> dict[str, Any]:
    """Returns the settings of a dataclass that were given on the command line, lists as tuples."""
    values = {each.name: getattr(arguments, each.name, None) for each in dataclasses.fields(settings)}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if value is not None
    }


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for target, draft, tree, machine and acceptance rule."""
    group = parser.add_argument_group("model")
    add_target_option(group)
    group.add_argument(
        "--draft",
        default="auto",
        help="auto, none, prompt-lookup, lookahead, or a head or small model: shipped name, folder, GGUF file, "
        "hub id (default: auto)",
    )
    group.add_argument(
        "--tree",
        help="chain[:DEPTH[,MIN_PROB]], static[:PATH,…], dynamic[:NODES,DEPTH,TOPK[,MIN_PROB]], "
        "or a file from `aquiline tune` (default: chosen by the device)",
    )
    add_machine_options(group)
    group.add_argument(
        "--rows", "--max-rows", dest="rows", type=int, default=16, metavar="N",
        help="requests that decode together (≥ 1; default: 16)",
    )  # fmt: skip
    group.add_argument(
        "--shared-lookup",
        action="store_true",
        help="look up drafts in earlier outputs of this process too, of all requests",
    )
    group.add_argument(
        "--lossy",
        metavar="RULE",
        help="accept more drafts, which CHANGES the output distribution: typical[:EPSILON,DELTA] or "
        "threshold:SINGLE,ACCUMULATED",
    )


MODEL_OPTIONS: dict[str, Any] = {
    "tree": None,
    "dtype": None,
    "device": "cpu",
    "threads": None,
    "rows": 16,
    "lossy": None,
}
"""Options of `add_model_options` that only our own engine has → default."""


def refuse_given(arguments: argparse.Namespace, defaults: dict[str, Any], where: str, remedy: str) -> None:
    """Rejects options that were given but have no effect."""
    for name, default in defaults.items():
        if getattr(arguments, name) != default:
            flag = "flags after --" if name == "flags" else f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} has no effect with {where}; {remedy}")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds the fields of `SamplingParams`; omitted options keep the model's defaults."""
    group = parser.add_argument_group("sampling")
    for name, kind, text in (
        ("max-new-tokens", int, "upper bound on emitted tokens (≥ 0; default: 128)"),
        ("min-new-tokens", int, "do not end before this many tokens (≥ 0)"),
        ("temperature", float, "sampling temperature; 0 is greedy (≥ 0)"),
        ("top-k", int, "keep the k likeliest tokens; 0 is off (≥ 0)"),
        ("top-p", float, "keep the likeliest tokens up to this total probability; 1 is off (> 0, ≤ 1)"),
        ("min-p", float, "drop tokens below this fraction of the likeliest one's probability; 0 is off (≥ 0, < 1)"),
        ("seed", int, "the same seed gives the same output (64 bits, ≥ -2^63; default: drawn)"),
        ("repetition-penalty", float, "divides the scores of tokens already in prompt or output; 1 is off (> 0)"),
        (
            "presence-penalty",
            float,
            "subtracted from the scores of tokens already in the output; 0 is off; < 0 favours them",
        ),
        ("frequency-penalty", float, "subtracted per occurrence in the output; 0 is off; < 0 favours repetition"),
        ("n", int, "outputs per prompt (≥ 1; default: 1)"),
    ):
        group.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    group.add_argument("--stop", action="append", help="string that ends the output (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="do not stop at end tokens")
    group.add_argument(
        "--keep-special-tokens",
        dest="skip_special_tokens",
        action="store_false",
        default=None,
        help="print special tokens too",
    )


def parse_lossy(text: str | None) -> Any:
    """Parses --lossy."""
    from aquiline.sampling import LossyRule

    if text is None:
        return None
    kind, _, numbers = text.partition(":")
    try:
        values = [float(value) for value in numbers.split(",")] if numbers else []
    except ValueError:
        values = []
    if kind == "typical" and len(values) in (0, 2):
        return LossyRule("typical", **dict(zip(("epsilon", "delta"), values, strict=False)))
    if kind == "threshold" and len(values) == 2:
        return LossyRule("threshold", single=values[0], accumulated=values[1])
    raise ValueError(
        f"--lossy {text!r} is not a rule; allowed: typical[:EPSILON,DELTA] or threshold:SINGLE,ACCUMULATED"
    )


def set_threads(threads: int | None) -> None:
    """Applies --threads.

    Raises:
        ValueError: if it is below 1, or above the number of cores.
    """
    import os

    import torch

    if threads is not None:
        cores = os.cpu_count() or 1
        if not 1 <= threads <= cores:
            raise ValueError(f"--threads is {threads}; allowed: 1 … {cores}, the cores of this machine")
        torch.set_num_threads(threads)


def load_model(arguments: argparse.Namespace) -> Loaded:
    """Loads the model that the options describe, and logs what drafts."""
    from aquiline.engine.drafting import read_tree

    draft = None if arguments.draft == "none" else arguments.draft
    tree, lossy = read_tree(arguments.tree), parse_lossy(arguments.lossy)
    shared = arguments.shared_lookup
    if draft is None:
        for name, given in (("tree", tree is not None), ("lossy", lossy is not None), ("shared-lookup", shared)):
            if given:
                logger.warning("--%s has no effect with --draft none", name)
        tree, lossy, shared = None, None, False
    set_threads(arguments.threads)
    from aquiline.loading import load

    loaded = load(
        arguments.target,
        draft,
        tree=tree,
        dtype=arguments.dtype,
        device=arguments.device,
        lossy=lossy,
        max_rows=arguments.rows,
        shared_lookup=shared,
    )
    logger.info("drafting: %s", loaded.draft_name)
    return loaded


def warn_lossy(rule: LossyRule | None) -> None:
    """Warns if outputs do not have the target's distribution."""
    if rule is not None:
        logger.warning("lossy acceptance (%s): the output distribution differs from the target's", rule.kind)


def warn_without_effect(arguments: argparse.Namespace, params: SamplingParams) -> None:
    """Warns about sampling options that have no effect."""
    if params.temperature > 0:
        return
    for name in ("seed", "top_k", "top_p", "min_p"):
        if getattr(arguments, name) is not None:
            logger.warning("--%s has no effect at temperature 0, which is greedy", name.replace("_", "-"))
    if params.n > 1:
        logger.warning("--n %d repeats the same output %d times at temperature 0, which is greedy", params.n, params.n)


def output_record(prompt: Any, output: GenerationOutput, params: SamplingParams) -> dict[str, Any]:
    """Converts a prompt and its output to JSON-serialisable values; without draws, the seed is None."""
    return {
        "prompt": prompt,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "seed": output.seed if params.temperature > 0 else None,
        "stats": {name: getattr(output.stats, name) for name in _STATS},
    }


def params_of(arguments: argparse.Namespace, loaded: Loaded) -> SamplingParams:
    """Applies the sampling options to the model's defaults; warns about lossy rules and options without effect."""
    from dataclasses import replace

    from aquiline.sampling import check_lossy

    params = replace(loaded.defaults, **given_settings(arguments, type(loaded.defaults)))
    lossy = loaded.engine.lossy
    if lossy is not None:
        check_lossy(lossy, params.temperature)
    warn_lossy(lossy)
    warn_without_effect(arguments, params)
    return params
