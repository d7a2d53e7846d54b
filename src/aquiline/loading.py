"""`load`: a target, a drafter and a tokenizer behind one object."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aquiline.chat import ChatSession
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.drafter import Drafter, ObservingDrafter, SamplingDrafter
from aquiline.drafters.tree_policy import TreePolicy
from aquiline.drafting import GPU_TREE, SHIPPED, make_drafter
from aquiline.generate import (
    Engine,
    Request,
    StreamEvent,
    encode_prompt,
    generate_requests,
    stream_requests,
)
from aquiline.kinds import check_kind, flag
from aquiline.request import merged_params, naming_prompt
from aquiline.sampling import SamplingParams
from aquiline.targets.target import Target
from aquiline.verify import LossyRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GPU_TREE", "SHIPPED", "Loaded", "Prompt", "load", "make_drafter"]

logger = logging.getLogger("aquiline")

Prompt = str | Sequence[dict[str, str]] | Sequence[int]
"""Text, chat messages, or token ids."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A target with its drafter; made by `load`.

    Attributes:
        engine: target, drafter, tokenizer and end tokens.
        target_path: folder of the target's weights, or None for a model that was passed in.
        draft_name: what drafts, in words.
        defaults: sampling defaults of the model's generation_config.
    """

    engine: Engine
    target_path: Path | None
    draft_name: str
    defaults: SamplingParams

    @property
    def target(self) -> Target:
        """The target model."""
        return self.engine.target

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, or None for plain decoding."""
        return self.engine.drafter

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self.engine.tokenizer

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        **settings: Any,
    ) -> Any:
        """Generates for one prompt or a list of them.

        Args:
            prompt: text (a user's turn where the tokenizer has a chat template), chat messages,
                token ids, or a list of any of these, which decodes as one batch.
            params: settings; without it, the model's defaults (greedy unless it says otherwise).
            raw: take text as it is, without the chat template.
            **settings: fields of `SamplingParams` that override `params`.

        Returns:
            A `GenerationOutput`; for a list of prompts or n > 1, a list of them (n for each
            prompt, in order).
        """
        many = _is_batch(prompt)
        requests = self._requests(prompt, params, raw, settings)
        outputs = generate_requests(self.engine, requests)
        return outputs if many or len(outputs) > 1 else outputs[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        **settings: Any,
    ) -> Iterator[StreamEvent]:
        """As `generate`, but yields pieces as they are emitted; closing the iterator ends it."""
        return stream_requests(self.engine, self._requests(prompt, params, raw, settings))

    def chat(self, system: str | None = None) -> ChatSession:
        """Starts a conversation that keeps its keys and values between turns."""
        return ChatSession(self.engine, system=system, defaults=self.defaults)

    def plain(self) -> Loaded:
        """The same target without speculation; shares the weights."""
        return replace(self, engine=replace(self.engine, drafter=None, lossy=None), draft_name="plain")

    def _requests(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | None, raw: bool, settings: dict[str, Any]
    ) -> list[Request]:
        params = merged_params(params, self.defaults, settings)
        flag("raw", raw)
        prompts: list[Any] = list(prompt) if _is_batch(prompt) else [prompt]
        requests = []
        for index, item in enumerate(prompts):
            with naming_prompt(index, len(prompts)):
                requests.append(Request(encode_prompt(self.engine, item, raw=raw), params))
        return requests


def _is_batch(prompt: Any) -> bool:
    """True for a list of prompts: not a text, not token ids, not chat messages."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence) or not prompt:
        return False  # what is no prompt either is for `encode_prompt` to refuse
    return isinstance(prompt[0], Sequence)


def load(
    target: str | Path | PreTrainedModel | Target,
    draft: str | Path | Drafter | None = "auto",
    *,
    tree: TreePolicy | str | Path | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    packed: bool = True,
    exact: bool | None = None,
    adaptive: bool | None = None,
    lossy: LossyRule | None = None,
    max_rows: int = 8,
) -> Loaded:
    """Loads a target and what drafts for it.

    Args:
        target: alias ("smollm2"), model folder, GGUF file, hub id, or a transformers model, of
            which nothing is modified.
        draft: "auto" takes a shipped head that was trained for this very target, else prompt
            lookup, and says which; None decodes plainly; "prompt-lookup"; "lookahead"; the name,
            folder, GGUF file or hub id of a head (EAGLE, Medusa, Hydra, a small model); or a
            drafter.
        tree: `Chain`, `StaticTree` or `DynamicTree`, or a file written by `aquiline tune`; None
            takes what pays on the device.
        tokenizer: needed with a transformers model if prompts are texts.
        dtype: of the weights; None takes bfloat16 where it is fast, else float32.
        device: where the target runs.
        packed: use the fast CPU copy where the machine has its kernels.
        exact: whether the packed copy keeps a token's bits independent of what is forwarded with
            it; None does so in bfloat16, where it decides near-ties. False is faster for many rows.
        adaptive: fall back towards plain decoding where speculation does not pay; None does so
            unless a tree or a drafter of your own was given.
        lossy: an acceptance rule that CHANGES the output distribution.
        max_rows: requests that decode together.

    Raises:
        ValueError: an unknown name, a head that does not fit, contradictory settings.
    """
    _check_settings(target, draft, tree, packed=packed, exact=exact, adaptive=adaptive)
    path: Path | None = None
    if isinstance(target, str | Path):
        path, model, own_tokenizer = _from_files(target, tokenizer is None, dtype, device)
        tokenizer = tokenizer if tokenizer is not None else own_tokenizer
    else:
        model = _as_given(target, dtype, device)
    fast: Target = _fast_copy(model, exact) if packed else model
    _check_parts(draft, tokenizer, lossy)
    drafter, name = make_drafter(draft, tree, fast, path, packed)
    if drafter is not None:
        drafter = _watched(drafter, adaptive, tree is None and isinstance(draft, str | Path))
    end_ids, defaults = _generation_defaults(path, target, tokenizer)
    engine = Engine(fast, drafter, tokenizer, end_ids, lossy=lossy, max_rows=max_rows)
    return Loaded(engine, path, name, defaults)


def _check_settings(target: Any, draft: Any, tree: Any, **flags: Any) -> None:
    """Refuses empty names, which would mean the present folder, and what is neither True nor False."""
    for name, value in (("target", target), ("draft", draft), ("tree", tree)):
        if value == "":
            raise ValueError(f"{name} is ''; allowed: a name or a file, or leave it out")
    for name, value in flags.items():
        flag(name, value, optional=name != "packed")


def _watched(drafter: Drafter, adaptive: bool | None, default: bool) -> Drafter:
    """Wraps a drafter, where asked for or by default, in one that falls back towards plain decoding."""
    sees_all = isinstance(drafter, ObservingDrafter) or (isinstance(drafter, SamplingDrafter) and drafter.sampled)
    if adaptive and sees_all:
        raise ValueError(f"{type(drafter).__name__} must see every step and cannot be adaptive; leave adaptive=False")
    wanted = adaptive if adaptive is not None else default and not sees_all
    return Adaptive(drafter) if wanted and not isinstance(drafter, Adaptive) else drafter


def _from_files(
    target: str | Path, with_tokenizer: bool, dtype: torch.dtype | str | None, device: str | torch.device
) -> tuple[Path, Target, Any]:
    """A target's folder, its model, and its tokenizer where that is wanted."""
    from aquiline.checkpoints.targets import resolve_target
    from aquiline.checkpoints.tokenizer import load_tokenizer
    from aquiline.targets.loading import load_target

    path = resolve_target(target, logger.info)
    model = load_target(path, _dtype(dtype, device), _existing(_device(device)))
    return path, model, load_tokenizer(path) if with_tokenizer else None


def _as_given(target: Any, dtype: torch.dtype | str | None, device: str | torch.device) -> Target:
    """A model that was passed in, as a target."""
    from aquiline.targets.hf import target_from_hf

    if not hasattr(target, "new_cache") and not isinstance(target, torch.nn.Module):
        raise TypeError(
            f"target is a {type(target).__name__}; allowed: an alias, a folder, a GGUF file, a hub id, a "
            "transformers model, or a Target"
        )
    model: Target = target if hasattr(target, "new_cache") else target_from_hf(target)
    _check_given(model, dtype, device)
    return model


def _check_given(target: Target, dtype: torch.dtype | str | None, device: str | torch.device) -> None:
    """A model that was passed in stays what and where it is: refuses to promise something else."""
    if dtype is not None and _dtype(dtype, device) != target.dtype:
        raise ValueError(
            f"dtype is {dtype}, but the model is in {target.dtype}; convert it before, and leave out dtype"
        )
    # The default device says nothing about the model's.
    if _device(device).type not in ("cpu", target.device.type):
        raise ValueError(
            f"device is {device}, but the model is on {target.device}; move it before, and leave out device"
        )


def _check_parts(draft: Any, tokenizer: Any, lossy: Any) -> None:
    methods = ("new_state", "extend", "propose", "reset")
    drafts = not isinstance(draft, type) and all(callable(getattr(draft, name, None)) for name in methods)
    if not (draft is None or isinstance(draft, str | Path) or drafts):
        raise TypeError(
            f"draft is a {type(draft).__name__}; allowed: a name, a folder, a file, a hub id, a Drafter, or None "
            "(a small model of your own: SmallModel)"
        )
    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(f"tokenizer is {tokenizer!r}; allowed: a Hugging Face tokenizer or None")
    if not isinstance(lossy, LossyRule | None):
        raise TypeError(f"lossy is {lossy!r}; allowed: a LossyRule or None")


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; allowed: 'cpu', 'cuda', 'cuda:1', …") from error


def _existing(device: torch.device) -> torch.device:
    there = torch.cuda.device_count()
    if device.type == "meta" or (device.type == "cuda" and (device.index or 0) >= there):
        raise ValueError(f"device is '{device}', and PyTorch sees {there} CUDA devices here; allowed: 'cpu', …")
    return device


def _dtype(dtype: torch.dtype | str | None, device: str | torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if dtype is not None:
        check_kind("dtype", dtype, isinstance(dtype, str | torch.dtype), "a dtype or its name")
        named = {
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
            "float64": torch.float64,
        }
        if dtype not in named:
            raise ValueError(f"dtype {dtype!r} is not known; allowed: {', '.join(named)}")
        return named[str(dtype)]
    if _device(device).type != "cpu":
        return torch.bfloat16
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() if torch.backends.mkldnn.is_available() else False  # type: ignore[no-untyped-call]
    return torch.bfloat16 if fast else torch.float32


def _fast_copy(target: Any, exact: bool | None) -> Any:
    from aquiline.targets.decoder import Decoder
    from aquiline.targets.packed import packed

    return (packed(target, exact) or target) if isinstance(target, Decoder) else target


def _generation_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not readable JSON ({error}); fetch or delete it") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, expected an object; fetch or delete it")
    return config


def _generation_defaults(path: Path | None, target: Any, tokenizer: Any) -> tuple[tuple[int, ...], SamplingParams]:
    """End tokens and sampling defaults from generation_config, else from the tokenizer."""
    config: dict[str, Any] = {}
    if path is not None and (path / "generation_config.json").is_file():
        config = _generation_config(path / "generation_config.json")
    elif hasattr(target, "generation_config") and target.generation_config is not None:
        config = target.generation_config.to_dict()
    end = config.get("eos_token_id")
    if end is None and tokenizer is not None:
        end = tokenizer.eos_token_id
    ids = tuple(end) if isinstance(end, list | tuple) else () if end is None else (end,)
    if not all(type(token) is int for token in ids):
        raise ValueError(f"generation_config has eos_token_id {end!r}; allowed: a token id, or several")
    if not config.get("do_sample"):
        return ids, SamplingParams()
    try:
        sampled = SamplingParams(
            temperature=config.get("temperature") or 1.0,
            top_k=config.get("top_k") or 0,
            top_p=config.get("top_p") or 1.0,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"the model's generation_config is not usable: {error}") from error
    logger.info("the model's generation_config samples: %s; give temperature=0 for greedy output", sampled)
    return ids, sampled
