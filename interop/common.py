"""Options, chain decoding and comparison, shared by the conformance scripts.

Runs in this project's environment. Engines run in their own environments and exchange JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TextIO

import torch
from pieces import HERE, Piece, add, collect, digest

from aquiline.checkpoints.eagle.stored import head_from_stored
from aquiline.checkpoints.open import open_head, resolve_head, stored_eagle
from aquiline.decode import Occupant, free, new_state, prefill, step
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.trees import Chain
from aquiline.models.resolve import resolve_target, target_fingerprint
from aquiline.sampling import SamplingParams, TokenChooser
from aquiline.stats import GenerationStats
from aquiline.targets.decoder import Decoder, config_from_hf, load_state

RESULTS = HERE / "results"
# What our own results depend on: this file and the modules that it loads.
_CODE = digest(Path(__file__), *sorted(Path(m.__file__ or "") for n, m in sys.modules.items() if n[:9] == "aquiline."))


@dataclass(frozen=True)
class Task:
    """Inputs of a comparison between an engine and our own decoding.

    Attributes:
        head: the head's folder.
        target: the target's folder.
        prompts: token ids.
        end: end tokens.
        k: drafts a step.
        limit: tokens a prompt.
        record: whether the numbers go into interop/results.
        identity: of the head, when the comparison began.
    """

    head: Path
    target: Path
    prompts: list[list[int]]
    end: list[int]
    k: int
    limit: int
    record: bool
    identity: dict[str, str]

    def name(self, series: str, *parts: object) -> str:
        """Name of a series of results of this head (see `pieces`)."""
        return self.plain_name(series, self.k, *parts, self.head.name, digest(self.head))

    def plain_name(self, series: str, *parts: object) -> str:
        """Name of a series of results of this target that no head has a part in."""
        return "-".join(map(str, (series, *parts, self.limit, target_fingerprint(self.target)[:8])))


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all comparisons share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("head", type=head_path, help="folder, hub id or shipped head")
    made.add_argument("--check", action="store_true", help="only check these arguments, before anything is installed")
    made.add_argument("--target", default="smollm2")
    made.add_argument("--k", type=int, default=4, help="drafts a step")
    made.add_argument("--limit", type=int, default=96, help="tokens a prompt")
    made.add_argument("--prompts", type=int, default=24, help="number of prompts from prompts.jsonl (default: 24)")
    made.add_argument("--record", action="store_true", help="write the numbers into interop/results")
    return made


def head_path(name: str) -> Path:
    """The folder of a head that is named on the command line."""
    try:
        return resolve_head(name)
    except (ValueError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def checked(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line; ends the process after that with --check."""
    args = options.parse_args()
    if args.check:
        options.exit()
    return args


def task_of(args: argparse.Namespace) -> Task:
    """Builds the task that the options describe."""
    folder = resolve_target(args.target)
    prompts, end = encode_prompts(folder, read_prompts(args.prompts))
    head = args.head.resolve()
    return Task(head, folder, prompts, end, args.k, args.limit, args.record, head_identity(head))


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


def our_chains(task: Task, *, like_llamacpp: bool = False) -> Piece:
    """Our own decoding with chains of k drafts, prompt by prompt; see `decode`."""

    def run(prompts: list[list[int]], file: TextIO) -> None:
        target = load_target(task.target)
        opened = open_head(task.head, target.shape)
        print(opened.report, flush=True)
        head = head_from_stored(stored_eagle(opened), torch.float32)
        drafter = EagleDrafter(head, target, Chain(task.k))
        for prompt in prompts:
            piece = decode(target, drafter, prompt, task.end, task.limit, like_llamacpp=like_llamacpp)
            add(file, {"prompts": [prompt], **piece})

    name = task.name("aquiline-like-llamacpp" if like_llamacpp else "aquiline", _CODE)
    return collect(name, task.prompts, run, "Aquiline's chains")


@torch.inference_mode()
def decode(
    target: Decoder,
    drafter: EagleDrafter | None,
    prompt: Sequence[int],
    end: Sequence[int],
    limit: int,
    *,
    like_llamacpp: bool = False,
) -> Piece:
    """Greedy decoding of one prompt in chains, or plain decoding without a drafter.

    Every step drafts k tokens, also beyond the budget and the end, as vLLM and OpenVINO do.

    Args:
        target: our decoder.
        drafter: of chains, or None.
        prompt: token ids.
        end: end tokens.
        limit: tokens.
        like_llamacpp: the first chain starts at the last prompt token, not after the first new
            one; a chain is at most as long as the remaining budget, but full again once none
            remains; and decoding ends after the budget, not at it.

    Returns:
        outputs: its token ids, cut after the first end token and at `limit`.
        drafts: verified chains. accepted: chains that accepted at least 1, 2, … k drafts.
    """
    k = drafter.policy.depth if drafter else 0
    state = new_state(target, drafter, 1, len(prompt) + limit + 2 * k + 2)
    occupant = Occupant(list(prompt), TokenChooser(SamplingParams(), 0, len(prompt)), GenerationStats())
    if like_llamacpp:
        # The prefill "chooses" the last prompt token.
        chooser, occupant.tokens = occupant.chooser, list(prompt[:-1])
        occupant.chooser = lambda logits, prefix: prompt[-1]  # type: ignore[assignment]
        list(prefill(target, drafter, state, 0, occupant))
        occupant.chooser, emitted = chooser, []
    else:
        list(prefill(target, drafter, state, 0, occupant))
        emitted = occupant.tokens[-1:]
    last = limit + 1 if like_llamacpp else limit
    while len(emitted) < last and not set(emitted) & set(end):
        depth = None
        if like_llamacpp and limit - len(emitted) > 1:
            depth = min(k, limit - len(emitted) - 1)
        emitted = emitted + step(target, drafter, state, [0], max_depth=depth)[0].tokens
    free(drafter, state, 0)
    accepted = [*occupant.stats.accepted_at, *[0] * k][:k]
    return {"outputs": [cut(emitted, end, last)], "drafts": occupant.stats.steps if k else 0, "accepted": accepted}


def cut(tokens: Sequence[int], end: Sequence[int], limit: int) -> list[int]:
    """Tokens up to and with the first end token, at most `limit`."""
    stops = [i + 1 for i, token in enumerate(tokens) if token in end]
    return list(tokens[: min([*stops, limit])])


def counts_table(engine: str, ours: Piece, theirs: Piece) -> str:
    """A Markdown table of acceptance counts."""
    lines = [f"| chains that accepted at least | {engine} | Aquiline | ratio |", "|---|---|---|---|"]
    rows = [("0 (all)", theirs["drafts"], ours["drafts"])]
    rows += [(str(i + 1), a, b) for i, (a, b) in enumerate(zip(theirs["accepted"], ours["accepted"], strict=True))]
    lines += [f"| {label} | {a} | {b} | {a / b if b else float('nan'):.4f} |" for label, a, b in rows]
    return "\n".join(lines) + "\n"


def within(ours: Piece, theirs: Piece, share: float = 0.02) -> bool:
    """True if chains and acceptances of each depth agree within `share`, or differ by one or two."""
    pairs = zip([theirs["drafts"], *theirs["accepted"]], [ours["drafts"], *ours["accepted"]], strict=True)
    return all(abs(a - b) <= max(2, share * b) for a, b in pairs)


def head_identity(head: Path) -> dict[str, str]:
    """Name and checksum of a head, so that numbers can be told to belong to it."""
    weights = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()
    return {"head": head.resolve().name, "model.safetensors": weights}


def conclude(
    task: Task, name: str, engine: str, ours: Piece, theirs: Piece, agreements: tuple[str, str], **more: Any
) -> None:
    """Prints how an engine and our decoding compare, and records it if that was asked for.

    Args:
        task: what they were compared on.
        name: of the engine in file names.
        engine: name and version.
        ours, theirs: with drafts and accepted.
        agreements: of the engine's drafted outputs with ours, and with its own plain decoding.
        more: what else to record.

    Raises:
        SystemExit: if the counts differ by more than 2 %, or the head was replaced meanwhile.
    """
    if head_identity(task.head) != task.identity:
        raise SystemExit(f"{task.head} was replaced while it was compared; run this again")
    print(counts_table(engine, ours, theirs))
    print(f"Outputs with drafts, {engine} and Aquiline: {agreements[0]}.")
    print(f"Outputs of {engine} with drafts and plain: {agreements[1]}.")
    if task.record:
        counts = {
            side: {key: run[key] for key in ("drafts", "accepted")}
            for side, run in (("theirs", theirs), ("ours", ours))
        }
        record(
            f"{name}-{task.head.name}",
            {
                "engine": engine,
                **task.identity,
                "dtype": "float32",
                "k": task.k,
                "limit": task.limit,
                "prompts": len(task.prompts),
                **more,
                **counts,
                "outputs_as_ours": agreements[0],
                "outputs_as_plain": agreements[1],
            },
        )
    if not within(ours, theirs):
        raise SystemExit("the counts differ by more than 2 %")


def record(name: str, content: dict[str, Any]) -> None:
    """Writes the numbers of a run, small enough to be kept, into interop/results."""
    RESULTS.mkdir(exist_ok=True)
    content = {**content, "recorded": date.today().isoformat()}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def agreements(ours: Piece, theirs: Piece, plain: Piece) -> tuple[str, str]:
    """Compares an engine's drafted outputs with ours, and with its own plain ones."""
    return agreement(theirs["outputs"], ours["outputs"]), agreement(theirs["outputs"], plain["outputs"])


def agreement(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> str:
    """Counts equal sequences, and names the token at which each of the others diverges."""
    same = sum(list(a) == list(b) for a, b in zip(left, right, strict=True))
    tokens = sum(len(a) for a in right)
    text = f"{same} of {len(right)} equal ({tokens} tokens)"
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if list(a) != list(b):
            at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            text += f"; prompt {i} parts at token {at}"
    return text
