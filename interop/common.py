"""Shared by the conformance scripts: prompts, our own chain decoding, and the comparison.

Runs in this project's environment. Engines run in their own environments and exchange JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aquiline.checkpoints.heads import read_any_head
from aquiline.decode import Row, free, new_state, prefill, step
from aquiline.drafters.eagle_drafter import EagleDrafter
from aquiline.drafters.tree_policy import Chain
from aquiline.sampling import SamplingParams, TokenChooser
from aquiline.stats import GenerationStats
from aquiline.targets.decoder import Decoder, config_from_hf, load_state

HERE = Path(__file__).parent


def load_target(folder: Path) -> Decoder:
    """Our decoder in float32."""
    from safetensors.torch import load_file

    decoder = Decoder(config_from_hf(json.loads((folder / "config.json").read_text()))).eval()
    load_state(decoder, load_file(folder / "model.safetensors"), str(folder))
    return decoder.requires_grad_(False)


def read_prompts(limit: int) -> list[str]:
    """The first `limit` prompts of prompts.jsonl."""
    lines = (HERE / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines][:limit]


def encode_prompts(folder: Path, prompts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """Token ids of the prompts in the target's chat template, and its end tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)["input_ids"]
        for prompt in prompts
    ]
    end = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id", tokenizer.eos_token_id)
    return ids, end if isinstance(end, list) else [end]


@torch.inference_mode()
def our_chain(
    target: Decoder,
    head_path: Path | None,
    prompts: Sequence[Sequence[int]],
    end: Sequence[int],
    k: int,
    limit: int,
    *,
    like_llamacpp: bool = False,
) -> dict[str, Any]:
    """Greedy decoding with chains of k drafts, or plain decoding without a head.

    Every step drafts k tokens, also beyond the budget and the end, as vLLM and OpenVINO do.

    Args:
        target: our decoder.
        head_path: the head, or None for plain decoding.
        prompts: token ids.
        end: end tokens.
        k: drafts a step.
        limit: tokens a prompt.
        like_llamacpp: the first chain starts at the last prompt token, not behind the first new
            one; a chain is no longer than what the budget leaves, but whole again where it leaves
            nothing; and decoding ends behind the budget, not at it.

    Returns:
        outputs: token ids of each prompt, cut behind the first end token and at `limit`.
        drafts: verified chains. accepted: chains that accepted at least 1, 2, … k drafts.
    """
    drafter = None
    if head_path is not None:
        head, report = read_any_head(head_path, target.shape)
        print(report)
        drafter = EagleDrafter(head, target, Chain(k))
    outputs, drafts, accepted = [], 0, [0] * k
    for prompt in prompts:
        state = new_state(target, drafter, 1, len(prompt) + limit + 2 * k + 2)
        request = Row(list(prompt), TokenChooser(SamplingParams(), 0, len(prompt)), GenerationStats())
        if like_llamacpp:
            # The prefill "chooses" the last prompt token.
            chooser, request.tokens, last = request.chooser, list(prompt[:-1]), prompt[-1]
            request.chooser = lambda logits, prefix, last=last: last  # type: ignore[assignment]
            prefill(target, drafter, state, 0, request)
            request.chooser, emitted = chooser, []
        else:
            emitted = prefill(target, drafter, state, 0, request).tokens
        last = limit + 1 if like_llamacpp else limit
        while len(emitted) < last and not set(emitted) & set(end):
            depth = None
            if like_llamacpp and limit - len(emitted) > 1:
                depth = min(k, limit - len(emitted) - 1)
            emitted = emitted + step(target, drafter, state, [0], max_depth=depth)[0].tokens
        free(drafter, state, 0)
        outputs.append(cut(emitted, end, last))
        if drafter is not None:
            drafts += request.stats.steps
            for i, count in enumerate(request.stats.accepted_at):
                accepted[i] += count
    return {"outputs": outputs, "drafts": drafts, "accepted": accepted}


def cut(tokens: Sequence[int], end: Sequence[int], limit: int) -> list[int]:
    """Tokens up to and with the first end token, at most `limit`."""
    stops = [i + 1 for i, token in enumerate(tokens) if token in end]
    return list(tokens[: min([*stops, limit])])


def counts_table(engine: str, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """A Markdown table of acceptance counts."""
    lines = [f"| chains that accepted at least | {engine} | Aquiline | ratio |", "|---|---|---|---|"]
    rows = [("0 (all)", theirs["drafts"], ours["drafts"])]
    rows += [(str(i + 1), a, b) for i, (a, b) in enumerate(zip(theirs["accepted"], ours["accepted"], strict=True))]
    lines += [f"| {label} | {a} | {b} | {a / b if b else float('nan'):.4f} |" for label, a, b in rows]
    return "\n".join(lines) + "\n"


def within(ours: dict[str, Any], theirs: dict[str, Any], share: float = 0.02) -> bool:
    """True if chains and acceptances of each depth agree within `share`, or differ by one or two."""
    pairs = zip([theirs["drafts"], *theirs["accepted"]], [ours["drafts"], *ours["accepted"]], strict=True)
    return all(abs(a - b) <= max(2, share * b) for a, b in pairs)


def head_identity(head: Path) -> dict[str, str]:
    """Name and checksum of a head, so that numbers can be told to belong to it."""
    weights = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()
    return {"head": head.resolve().name, "model.safetensors": weights}


def summary(
    head: Path, engine: str, ours: dict[str, Any], theirs: dict[str, Any], agreements: tuple[str, str], **more: Any
) -> dict[str, Any]:
    """The numbers of a run, in one shape for all engines.

    Args:
        head: the head's folder.
        engine: name and version.
        ours, theirs: with drafts and accepted.
        agreements: of the engine's drafted outputs with ours, and with its own plain decoding.
        more: settings and versions.
    """
    counts = {
        name: {key: run[key] for key in ("drafts", "accepted")} for name, run in (("theirs", theirs), ("ours", ours))
    }
    outputs = {"outputs_as_ours": agreements[0], "outputs_as_plain": agreements[1]}
    return {"engine": engine, **head_identity(head), "dtype": "float32", **more, **counts, **outputs}


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Writes the numbers of a run, small enough to be kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def compare(engine: str, ours: dict[str, Any], theirs: dict[str, Any], plain: dict[str, Any]) -> str:
    """The table, and how the outputs agree."""
    return (
        counts_table(engine, ours, theirs)
        + f"\nOutputs with drafts, {engine} and Aquiline: {agreement(theirs['outputs'], ours['outputs'])}."
        + f"\nOutputs of {engine} with drafts and plain: {agreement(theirs['outputs'], plain['outputs'])}."
    )


def agreement(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> str:
    """How many sequences are equal, and where the others part."""
    same = sum(list(a) == list(b) for a, b in zip(left, right, strict=True))
    tokens = sum(len(a) for a in right)
    text = f"{same} of {len(right)} equal ({tokens} tokens)"
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if list(a) != list(b):
            at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            text += f"; prompt {i} parts at token {at}"
    return text
