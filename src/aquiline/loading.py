"""`load`: a target, a drafter and a tokenizer behind one object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aquiline.checks import flag
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.drafter import Drafter, ObservingDrafter, SamplingDrafter
from aquiline.drafters.trees import TreePolicy
from aquiline.engine.chat import ChatSession
from aquiline.engine.drafting import GPU_TREE, SHIPPED, make_drafter
from aquiline.engine.generate import (
    Engine,
    Request,
    StreamEvent,
    encode_prompt,
    generate_requests,
    stream_requests,
)
from aquiline.engine.opening import fast_copy, generation_defaults, open_target
from aquiline.engine.request import merged_params, naming_prompt
from aquiline.sampling import SamplingParams
from aquiline.targets.target import Target
from aquiline.verify import LossyRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GPU_TREE", "SHIPPED", "Loaded", "Prompt", "load", "make_drafter"]

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
    path, model, tokenizer = open_target(target, tokenizer, dtype, device)
    fast = fast_copy(model, exact) if packed else model
    _check_parts(draft, tokenizer, lossy)
    drafter, name = make_drafter(draft, tree, fast, path, packed)
    if drafter is not None:
        drafter = _watched(drafter, adaptive, tree is None and isinstance(draft, str | Path))
    end_ids, defaults = generation_defaults(path, target, tokenizer)
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
