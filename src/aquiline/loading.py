"""`load`: one object that holds a target, its drafter and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aquiline.checkpoints.open import resolve_head
from aquiline.checks import flag
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.drafter import Drafter, Drafting, Needs
from aquiline.drafters.store import Prediction
from aquiline.engine.chat import ChatSession
from aquiline.engine.drafting import ServedHead, Tree, make_drafter, read_tree, swap_head
from aquiline.engine.generate import generate_requests, stream_requests
from aquiline.engine.opening import (
    check_exact,
    fast_form,
    generation_defaults,
    integers_refused,
    open_target,
    static_form,
)
from aquiline.engine.request import Engine, Request, StreamEvent, merged_params, naming_prompt
from aquiline.engine.text import Prompt, encode_expected, encode_prompt
from aquiline.engine.watch import Watch
from aquiline.native.codes import GROUPS
from aquiline.sampling import LossyRule, SamplingParams
from aquiline.targets.cost import step_costs
from aquiline.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Loaded:
    """A target with its drafter, returned by `load`.

    Attributes:
        engine: target, drafter, tokenizer and end tokens.
        target_path: folder of the target's weights, or None for a model passed as an object.
        draft_name: description of the draft, for display.
        defaults: sampling defaults from the model's generation_config.
        head: the EAGLE head that drafts, a wrapped one among them; None where there is none.
    """

    engine: Engine
    target_path: Path | None
    draft_name: str
    defaults: SamplingParams
    head: ServedHead | None = None

    @property
    def target(self) -> Target:
        """The target."""
        return self.engine.target

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, or None for plain decoding."""
        return self.engine.drafter

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self.engine.tokenizer

    @property
    def watch(self) -> Watch:
        """Acceptance of all requests so far: `rates` by method and position, and `alarms` if one fell."""
        return self.engine.watch

    def swap_head(self, folder: str | Path) -> None:
        """Drafts with another EAGLE head from the next step on, in requests that run, too; no output changes.

        Raises:
            ValueError: if no EAGLE head drafts now, or the other has other sizes or another vocabulary.
        """
        if self.head is None:
            raise ValueError(f"{self.draft_name} drafts, no EAGLE head; load the model with the head instead")
        swap_head(self.head, resolve_head(folder), self.engine.lock)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        prediction: str | Sequence[int] | None = None,
        **settings: Any,
    ) -> Any:
        """Generates for one prompt or a list of them.

        Args:
            prompt: text (a user's turn if the tokenizer has a chat template), chat messages, token
                ids, or a list of these, which decodes as one batch.
            params: settings; None uses the model's defaults (greedy unless it specifies otherwise).
            raw: do not apply the chat template to text.
            tools: descriptions of tools, for the chat template.
            chat_template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}``.
            prediction: a text, or its token ids, that the outputs are expected to repeat in large part (the
                text to edit, an earlier answer); it is drafted from. The outputs stay the same.
            **settings: fields of `SamplingParams` that override `params`.

        Returns:
            A `GenerationOutput`; for a list of prompts or n > 1, a list of n outputs per prompt,
            in order.
        """
        template: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        requests = self._requests(prompt, params, raw=raw, prediction=prediction, **template, **settings)
        outputs = generate_requests(self.engine, requests)
        return outputs if _is_batch(prompt) or len(outputs) > 1 else outputs[0]

    def stream(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[StreamEvent]:
        """Takes the arguments of `generate`, and yields events as tokens are emitted; closing the iterator stops it."""
        return stream_requests(self.engine, self._requests(prompt, params, **options))

    def chat(
        self,
        system: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatSession:
        """Starts a conversation that keeps its keys and values across turns."""
        template: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        return ChatSession(self.engine, system=system, defaults=self.defaults, **template)

    def plain(self) -> Loaded:
        """Returns the same target without drafts, sharing the weights."""
        return replace(self, engine=replace(self.engine, drafter=None, lossy=None), draft_name="plain", head=None)

    def _requests(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None,
        *,
        raw: bool = False,
        prediction: str | Sequence[int] | None = None,
        tools: Any = None,
        chat_template_kwargs: Any = None,
        **settings: Any,
    ) -> list[Request]:
        tokenizer, drafting = self.engine.tokenizer, Drafting()
        if prediction is not None:
            drafting = Drafting(expected=Prediction(encode_expected(tokenizer, prediction)))
        params = merged_params(params, self.defaults, settings)
        flag("raw", raw)
        prompts: list[Any] = list(prompt) if _is_batch(prompt) else [prompt]
        requests = []
        for index, item in enumerate(prompts):
            with naming_prompt(index, len(prompts)):
                tokens = encode_prompt(tokenizer, item, raw=raw, tools=tools, chat_template_kwargs=chat_template_kwargs)
                requests.append(Request(tokens, params, drafting))
        return requests


def _is_batch(prompt: Any) -> bool:
    """True for a list of prompts: not a text, not token ids, not chat messages."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence) or not prompt:
        return False  # `encode_prompt` rejects invalid prompts
    return isinstance(prompt[0], Sequence)


def load(
    target: str | Path | PreTrainedModel | Target,
    draft: str | Path | Drafter | None = "auto",
    *,
    tree: Tree | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    packed: bool = True,
    compile: bool = False,
    exact: bool = False,
    adaptive: bool | None = None,
    lossy: LossyRule | None = None,
    max_rows: int = 16,
    shared_lookup: bool = False,
) -> Loaded:
    """Loads a target and its drafter.

    Args:
        target: alias ("smollm2"), model folder, GGUF file, hub id, or a transformers model, which is not modified.
        draft: "auto" (a shipped head for this target, else prompt lookup; logged), None (plain decoding),
            "prompt-lookup", "lookahead", a head's name, folder, GGUF file or hub id, or a drafter.
        tree: a tree, its text ("chain:4,0.15"), or a file of `aquiline tune`; None lets the device decide.
        tokenizer: required for text prompts if `target` is a transformers model.
        dtype: of the weights; None: bfloat16 where it is fast, else float32 on a CPU and float16 elsewhere. "int8" and
            "int4" quantise them for the native kernels; the output is plain decoding's with these weights.
        device: where the target runs.
        packed: use the form that is fast on the device: native kernels, packed weights, or joined projections in
            forwards of few shapes, which CUDA replays as graphs.
        compile: compile the target's steps with torch.compile, at the first of each size; not on the native kernels.
        exact: require that every draft emits plain decoding's tokens in bfloat16 too, as on the native kernels.
        adaptive: decode plainly while drafting does not pay; None: unless you passed a tree or a drafter.
        lossy: an acceptance rule that CHANGES the output distribution.
        max_rows: requests that decode together.
        shared_lookup: draft from earlier outputs of all requests too: the last 262,144 tokens, 11 MB.

    Raises:
        ValueError: an unknown name, a head that does not fit, contradictory settings, an `exact` that cannot hold here.
    """
    flags = {"packed": packed, "compile": compile, "exact": exact, "adaptive": adaptive, "shared_lookup": shared_lookup}
    _check_arguments(target, draft, tree, tokenizer, lossy, **flags)
    tree = read_tree(tree)  # before the target is loaded, which takes seconds
    path, model, tokenizer = open_target(target, tokenizer, dtype, device)
    fast = static_form(_fast(model, path, dtype, packed, exact), packed, compile)
    made = make_drafter(draft, tree, fast, path, packed, shared_lookup=shared_lookup)
    drafter = _watched(made.drafter, fast, adaptive, tree is None and isinstance(draft, str | Path))
    end_ids, defaults = generation_defaults(path, target, tokenizer)
    return Loaded(
        Engine(fast, drafter, tokenizer, end_ids, lossy=lossy, max_rows=max_rows), path, made.name, defaults, made.head
    )


def _fast(model: Target, path: Path | None, dtype: Any, packed: bool, exact: bool) -> Target:
    """Returns the form of a target that decodes."""
    if dtype in GROUPS and not packed:
        raise integers_refused(str(dtype), model)
    fast = fast_form(model, path is not None, dtype) if packed else model
    if exact:
        check_exact(fast)
    return fast


def _watched(drafter: Drafter | None, target: Target, adaptive: bool | None, default: bool) -> Drafter | None:
    """Wraps a drafter in `Adaptive` if requested or by default; a tree that the user chose is not pruned."""
    if drafter is None:
        return None
    if adaptive is None:
        adaptive = default and not (drafter.needs.every_step or drafter.needs.samples)
    if not adaptive:
        return drafter
    return Adaptive(drafter, step_costs(target) if default else None)


def _check_arguments(target: Any, draft: Any, tree: Any, tokenizer: Any, lossy: Any, **flags: Any) -> None:
    for name, value in (("target", target), ("draft", draft), ("tree", tree)):
        if value == "":  # which would mean the current folder
            raise ValueError(f"{name} is ''; allowed: a name or a file, or leave it out")
    for name, value in flags.items():
        flag(name, value, optional=name == "adaptive")
    drafts = isinstance(getattr(draft, "needs", None), Needs) and not isinstance(draft, type)
    if not (draft is None or isinstance(draft, str | Path) or drafts):
        raise TypeError(
            f"draft is a {type(draft).__name__}; allowed: a name, a folder, a file, a hub id, a Drafter, or None "
            "(a small model of your own: SmallModel)"
        )
    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(f"tokenizer is {tokenizer!r}; allowed: a Hugging Face tokenizer or None")
    if not isinstance(lossy, LossyRule | None):
        raise TypeError(f"lossy is {lossy!r}; allowed: a LossyRule or None")
