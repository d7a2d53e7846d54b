"""`load`: a target, a drafter and a tokenizer behind one object."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aquiline.chat import ChatSession
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.drafter import Drafter, ObservingDrafter, SamplingDrafter
from aquiline.drafters.eagle_drafter import EagleDrafter
from aquiline.drafters.prompt_lookup import PromptLookup
from aquiline.drafters.tree_policy import Chain, DynamicTree, StaticTree, TreePolicy
from aquiline.drafters.tuned import read_tuned
from aquiline.generate import (
    Engine,
    Request,
    StreamEvent,
    encode_prompt,
    generate_requests,
    stream_requests,
)
from aquiline.sampling import SamplingParams
from aquiline.targets.target import Target
from aquiline.verify import LossyRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("aquiline")

SHIPPED = Path(__file__).parent / "heads"
"""Draft heads that come with the package."""

Prompt = str | Sequence[dict[str, str]] | Sequence[int]
"""Text, chat messages, or token ids."""

CPU_TREE = Chain(depth=4, min_prob=0.15)
"""Small trees are what pays on a CPU: every further node costs a fraction of a forward."""

CPU_TREE_EAGLE1 = Chain(depth=3, min_prob=0.2)
"""An EAGLE-1/2 head reads the target's whole LM head at every draft step: shorter chains."""

GPU_TREE = DynamicTree(num_nodes=60, depth=7, top_k=10)
"""The papers' tree."""


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
        try:
            params = replace(params or self.defaults, **settings)
        except TypeError as error:
            known = ", ".join(SamplingParams.__dataclass_fields__)
            raise TypeError(f"unknown setting among {sorted(settings)}; allowed: {known}") from error
        prompts = list(prompt) if _is_batch(prompt) else [prompt]
        return [Request(encode_prompt(self.engine, item, raw=raw), params) for item in prompts]


def _is_batch(prompt: Any) -> bool:
    """True for a list of prompts: not a text, not token ids, not chat messages."""
    if isinstance(prompt, str) or not len(prompt):
        return False
    return not isinstance(prompt[0], int | dict)


def load(
    target: str | Path | PreTrainedModel | Target,
    draft: str | Path | Drafter | None = "auto",
    *,
    tree: TreePolicy | str | Path | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    packed: bool = True,
    adaptive: bool | None = None,
    lossy: LossyRule | None = None,
    max_rows: int = 8,
) -> Loaded:
    """Loads a target and what drafts for it.

    Args:
        target: alias ("smollm2"), model folder, GGUF file, hub id, or a transformers model, of
            which nothing is modified.
        draft: "auto" takes a shipped head that was trained for this very target, else prompt
            lookup, and says which; None decodes plainly; "prompt-lookup"; a folder or hub id of
            an EAGLE head; or a drafter.
        tree: `Chain`, `StaticTree` or `DynamicTree`, or a file written by `aquiline tune`; None
            takes what pays on the device.
        tokenizer: needed with a transformers model if prompts are texts.
        dtype: of the weights; None takes bfloat16 where it is fast, else float32.
        device: where the target runs.
        packed: use the fast CPU copy where the machine has its kernels.
        adaptive: fall back towards plain decoding where speculation does not pay; None does so
            unless a tree or a drafter of your own was given.
        lossy: an acceptance rule that CHANGES the output distribution.
        max_rows: requests that decode together.

    Raises:
        ValueError: an unknown name, a head that does not fit, contradictory settings.
    """
    from aquiline.targets.hf import target_from_hf
    from aquiline.targets.loading import load_target

    path, model = None, target
    if isinstance(target, str | Path):
        from aquiline.checkpoints.targets import resolve_target

        path = resolve_target(target, logger.info)
        model = load_target(path, _dtype(dtype, device), torch.device(device))
    elif isinstance(target, torch.nn.Module) and not hasattr(target, "new_cache"):
        model = target_from_hf(target)
    if path is not None and tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
    fast = _fast_copy(model) if packed else model
    drafter, name = make_drafter(draft, tree, fast, path, packed)
    watched = adaptive if adaptive is not None else tree is None and isinstance(draft, str | Path)
    if drafter is not None and watched:
        drafter = _watched(drafter)
    end_ids, defaults = _generation_defaults(path, target, tokenizer)
    engine = Engine(fast, drafter, tokenizer, end_ids, lossy=lossy, max_rows=max_rows)
    return Loaded(engine, path, name, defaults)


def _watched(drafter: Drafter) -> Drafter:
    if isinstance(drafter, ObservingDrafter) or (isinstance(drafter, SamplingDrafter) and drafter.sampled):
        raise ValueError(f"{type(drafter).__name__} must see every step and cannot be adaptive; leave adaptive=False")
    return drafter if isinstance(drafter, Adaptive) else Adaptive(drafter)


def _dtype(dtype: torch.dtype | str | None, device: str | torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None:
        named = {
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
            "float64": torch.float64,
        }
        if dtype not in named:
            raise ValueError(f"dtype {dtype!r} is not known; allowed: {', '.join(named)}")
        return named[dtype]
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() if torch.backends.mkldnn.is_available() else False
    return torch.bfloat16 if fast else torch.float32


def _fast_copy(target: Any) -> Any:
    from aquiline.targets.decoder import Decoder
    from aquiline.targets.packed import packed

    return (packed(target) or target) if isinstance(target, Decoder) else target


def make_drafter(
    draft: str | Path | Drafter | None,
    tree: TreePolicy | str | Path | None,
    target: Target,
    path: Path | None,
    packed: bool = True,
) -> tuple[Drafter | None, str]:
    """Resolves what drafts, and names it; arguments as `load`'s, `path` is the target's folder."""
    from aquiline.checkpoints.targets import target_fingerprint

    if isinstance(tree, str | Path) and draft is not None:
        choice = read_tuned(tree)
        if path is not None and choice.target_fingerprint not in (None, target_fingerprint(path)):
            logger.warning("%s was tuned on another target; tune again for this one", tree)
        tree = choice.tree
        if draft == "auto":
            draft = choice.draft
        if draft is None or tree is None:
            return None, f"plain (tuned: {choice.method})"
    if draft is None:
        if tree is not None:
            raise ValueError("a tree was given with draft=None, which drafts nothing; drop one of the two")
        return None, "plain"
    if not isinstance(draft, str | Path):
        return draft, type(draft).__name__
    if draft == "auto":
        head = shipped_head(path)
        if head is None:
            logger.info("no shipped head fits this target: drafting by prompt lookup")
            return _lookup(tree), "prompt lookup"
        draft = head
    if draft == "prompt-lookup":
        return _lookup(tree), "prompt lookup"
    return _eagle(Path(_head_folder(draft)), tree, target, path, packed)


def _lookup(tree: TreePolicy | None) -> PromptLookup:
    if tree is not None and not isinstance(tree, Chain):
        raise ValueError(f"prompt lookup drafts chains; allowed: Chain(depth) or None, got {tree!r}")
    return PromptLookup(depth=tree.depth) if isinstance(tree, Chain) else PromptLookup()


def _head_folder(draft: str | Path) -> Path:
    folder = Path(draft).expanduser()
    if folder.is_dir():
        return folder
    if (SHIPPED / str(draft)).is_dir():
        return SHIPPED / str(draft)
    if str(draft).count("/") == 1 and not str(draft).startswith((".", "/", "~")):
        from aquiline.checkpoints.targets import fetch_hub_folder

        return fetch_hub_folder(str(draft))
    names = ", ".join(sorted(p.name for p in SHIPPED.glob("*") if p.is_dir())) or "none"
    raise ValueError(
        f"unknown draft {str(draft)!r}: no such folder; allowed: auto, prompt-lookup, a head's folder, a hub id, "
        f"or a shipped head ({names})"
    )


def shipped_head(path: Path | None) -> Path | None:
    """The first shipped head whose target fingerprint is that of the target in `path`."""
    if path is None or not SHIPPED.is_dir():
        return None
    import json

    from aquiline.checkpoints.targets import target_fingerprint

    fingerprint = target_fingerprint(path)
    for config in sorted(SHIPPED.glob("*eagle3*/config.json")) + sorted(SHIPPED.glob("*/config.json")):
        if json.loads(config.read_text()).get("aquiline_target_fingerprint") == fingerprint:
            return config.parent
    return None


def _eagle(
    folder: Path, tree: TreePolicy | None, target: Target, path: Path | None, packed: bool
) -> tuple[EagleDrafter, str]:
    from aquiline.checkpoints.safeailab import read_head
    from aquiline.checkpoints.targets import target_fingerprint

    head = read_head(folder, target.shape, target.dtype)
    if path is not None and head.target_fingerprint and head.target_fingerprint != target_fingerprint(path):
        logger.warning(
            "the head in %s was trained for another target (fingerprints differ); drafts may rarely be accepted", folder
        )
    if tree is None:
        on_cpu = target.device.type == "cpu"
        tree = (CPU_TREE if head.config.kind == "eagle3" else CPU_TREE_EAGLE1) if on_cpu else GPU_TREE
    if not isinstance(tree, Chain | StaticTree | DynamicTree):
        raise ValueError(f"tree is {tree!r}; allowed: Chain, StaticTree, DynamicTree, a tuned file, or None")
    return EagleDrafter(head, target, tree, packed=packed), f"{folder.name} ({head.config.kind})"


def _generation_defaults(path: Path | None, target: Any, tokenizer: Any) -> tuple[tuple[int, ...], SamplingParams]:
    """End tokens and sampling defaults from generation_config, else from the tokenizer."""
    import json

    config: dict[str, Any] = {}
    if path is not None and (path / "generation_config.json").is_file():
        config = json.loads((path / "generation_config.json").read_text())
    elif hasattr(target, "generation_config") and target.generation_config is not None:
        config = target.generation_config.to_dict()
    end = config.get("eos_token_id")
    if end is None and tokenizer is not None:
        end = tokenizer.eos_token_id
    ids = tuple(end) if isinstance(end, list | tuple) else () if end is None else (end,)
    if not config.get("do_sample"):
        return ids, SamplingParams()
    sampled = SamplingParams(
        temperature=float(config.get("temperature") or 1.0),
        top_k=int(config.get("top_k") or 0),
        top_p=float(config.get("top_p") or 1.0),
    )
    logger.info("the model's generation_config samples: %s; give temperature=0 for greedy output", sampled)
    return ids, sampled
