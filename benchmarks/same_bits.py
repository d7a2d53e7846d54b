"""Checks that this working tree computes the bits of another revision.

    python benchmarks/same_bits.py 9ed2aa6

Trains every method for three steps on a tiny random target, and answers prompts with every shipped head and drafting
method, once with this tree's source and once with the revision's. Compares the tensors of heads and checkpoints and
the output ids; exits with 1 if any differ. Both sides run through the command line alone, so that modules may move.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

PROMPTS = ("What is a glacier?", "def fibonacci(n):", "Repeat: one two three one two three one two")
NEW_TOKENS = "24"
DECODING: dict[str, tuple[str, ...]] = {
    "plain": ("none",),
    "auto": ("auto",),
    "prompt-lookup": ("prompt-lookup",),
    "lookahead": ("lookahead",),
    "eagle static": ("smollm2-eagle", "--tree", "static"),
    "eagle chain": ("smollm2-eagle", "--tree", "chain:3"),
    "eagle3 chain": ("smollm2-eagle3", "--tree", "chain:4,0.15"),
    "eagle3 dynamic": ("smollm2-eagle3", "--tree", "dynamic:16,4,4"),
    "medusa": ("smollm2-medusa",),
    "medusa chain": ("smollm2-medusa", "--tree", "chain:3"),
    "hydra": ("smollm2-hydra",),
    "hydra chain": ("smollm2-hydra", "--tree", "chain:3"),
}
FLOAT32_ALONE = ("medusa", "hydra")
"""Their default is a tree, and timings decide whether to draft: in bfloat16 near-ties then fall either way."""

TRAINING: dict[str, tuple[str, ...]] = {
    "eagle3": ("--method", "eagle3", "--ttt-steps", "3"),
    "eagle3 pack recompute layers": ("--method", "eagle3", "--pack", "--recompute", "--layers", "5"),
    "eagle3 random": ("--method", "eagle3", "--start", "random", "--loss", "lk", "--muon-lr", "0"),
    "eagle": ("--method", "eagle", "--feature-weight", "0.5", "--feature-noise", "0.1"),
    "medusa": ("--method", "medusa", "--num-heads", "3", "--regress-positions", "300"),
    "medusa own head": ("--method", "medusa", "--own-lm-head", "--regress-positions", "0", "--loss", "tv"),
    "hydra": ("--method", "hydra", "--num-heads", "3", "--regress-positions", "300"),
    "small-model": ("--method", "small-model", "--num-layers", "3"),
}
DRAWN = ("eagle3", "eagle", "medusa", "hydra", "small-model")
"""Trainings whose heads then draft for the tiny target."""

_WORDS = ("the", "river", "ran", "past", "old", "stone", "houses", "people", "told", "long", "stories", "of", "rain")


def main() -> int:
    """Compares, prints a table, and returns 1 on a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="9ed2aa6", help="revision to compare with (default: 9ed2aa6)")
    parser.add_argument("--only", choices=("training", "decoding"), help="half of the work")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run_side(arguments.side, arguments.only)
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        before = folder / "revision"
        before.mkdir()
        archive = subprocess.run(
            ["git", "archive", arguments.revision, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(before)], input=archive, check=True)
        sides = {"revision": before / "src", "tree": ROOT / "src"}
        write_inputs(folder)
        running = [start(folder, name, source, arguments.only) for name, source in sides.items()]
        failed = [process.wait() for process in running]
        if any(failed):
            return 1
        differences = compare(*(folder / name for name in sides))
    print(f"{differences} of the above differ ({time.monotonic() - began:.0f} s)" if differences else "all equal")
    return 1 if differences else 0


def write_inputs(folder: Path) -> None:
    """A tiny random target with SmolLM2's tokenizer, and conversations."""
    import shutil

    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    import aquiline

    source = Path(aquiline.load("smollm2", None).target_path)
    config = LlamaConfig(
        vocab_size=json.loads((source / "config.json").read_text())["vocab_size"], hidden_size=48,
        intermediate_size=96, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    target = folder / "target"
    target.mkdir()
    tensors = {k: t.contiguous() for k, t in LlamaForCausalLM(config).state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    generator = np.random.default_rng(0)
    with (folder / "conversations.jsonl").open("w") as file:
        for _ in range(24):
            turns = [" ".join(generator.choice(_WORDS, int(generator.integers(5, 30)))) for _ in range(4)]
            roles = ("user", "assistant", "user", "assistant")
            messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")


def start(folder: Path, name: str, source: Path, only: str | None) -> subprocess.Popen[bytes]:
    """Starts one side with one thread: both run at the same time."""
    (folder / name).mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--side", str(folder / name), *(["--only", only] if only else [])]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def run_side(folder: Path, only: str | None) -> None:
    """Trains and decodes with the `aquiline` on the path; leaves everything in `folder`."""
    results: dict[str, Any] = {}
    if only != "decoding":
        train_all(folder, results)
    if only != "training":
        for dtype in ("float32", "bfloat16"):
            for name, draft in DECODING.items():
                if dtype == "bfloat16" and name in FLOAT32_ALONE:
                    continue
                decode(results, f"{name} {dtype}", ("--draft", *draft, "--dtype", dtype))
    (folder / "ids.json").write_text(json.dumps(results))


def train_all(folder: Path, results: dict[str, Any]) -> None:
    """Every training in both dtypes, online and from a feature folder, then drafts with the heads."""
    target, data = str(folder.parent / "target"), str(folder / "set")
    conversations = str(folder.parent / "conversations.jsonl")
    run("prepare", conversations, "--target", target, "--output", data, "--validation", "0.1")
    common = (
        "--target", target, "--draft-vocab-size", "200", "--max-length", "96", "--batch-positions", "180",
        "--micro-positions", "96", "--total-positions", "540", "--warmup-positions", "60", "--log-steps", "1",
    )  # fmt: skip
    for name, options in TRAINING.items():
        for dtype in ("float32", "bfloat16"):
            kept = ("--features", str(folder / f"features-{dtype}")) if "eagle3" not in name else ()
            output = str(folder / "runs" / f"{name} {dtype}")
            run("train", data, "--output", output, "--dtype", dtype, *common, *kept, *options)
    for name in DRAWN:
        head = str(folder / "runs" / f"{name} float32" / "head")
        decode(results, f"trained {name}", ("--target", target, "--draft", head, "--dtype", "float32"))


def decode(results: dict[str, Any], name: str, options: tuple[str, ...]) -> None:
    """Greedy and seeded output ids of the prompts."""
    for temperature in ("0", "1"):
        sampling = ("--temperature", temperature, "--max-new-tokens", NEW_TOKENS, *(("--seed", "7") * int(temperature)))
        text = run("generate", *PROMPTS, "--json", *sampling, *options)
        results[f"{name} T={temperature}"] = [json.loads(line)["token_ids"] for line in text.splitlines()]


def run(*arguments: str) -> str:
    """Runs a command of the command line in this process; returns its standard output."""
    from aquiline.cli import main as command_line

    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = command_line([*arguments, "--quiet"])
    if code:
        raise SystemExit(f"aquiline {' '.join(arguments)} returned {code}")
    return output.getvalue()


def compare(before: Path, after: Path) -> int:
    """Prints a line for everything that was computed; returns how many differ."""
    differences = 0
    for run_folder in sorted((before / "runs").glob("*")):
        one, two = (dict(tensors(side / "runs" / run_folder.name)) for side in (before, after))
        wrong = sorted(name for name in one.keys() | two.keys() if not equal(one.get(name), two.get(name)))
        differences += report(f"training {run_folder.name} ({len(one)} tensors)", wrong)
    ids = [json.loads((side / "ids.json").read_text()) for side in (before, after)]
    for name in ids[0]:
        wrong = [f"prompt {i}" for i, (a, b) in enumerate(zip(ids[0][name], ids[1][name], strict=True)) if a != b]
        differences += report(f"decoding {name} ({sum(map(len, ids[0][name]))} tokens)", wrong)
    return differences


def report(name: str, wrong: list[str]) -> int:
    """Prints one line of the table."""
    print(f"{'DIFFERS' if wrong else 'equal':8} {name}{': ' + ', '.join(wrong[:4]) if wrong else ''}", flush=True)
    return int(bool(wrong))


def tensors(output: Path) -> Iterator[tuple[str, Any]]:
    """Named tensors and numbers of a run: its head, and its checkpoint's weights, optimisers and place in the data."""
    import torch
    from safetensors.torch import load_file

    for file in sorted((output / "head").glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            yield f"head/{file.name}/{name}", tensor
    for file in sorted((output / "head").glob("*.bin")):
        for name, tensor in torch.load(file, weights_only=True).items():
            yield f"head/{file.name}/{name}", tensor
    yield "head/config.json", json.loads((output / "head" / "config.json").read_text())
    state = torch.load(output / "checkpoint.pt", weights_only=True)
    yield from leaves("network", state["network"])
    yield from leaves("optimisers", [optimiser["state"] for optimiser in state["optimisers"]])
    yield "mixture", state["mixture"]
    yield "progress", state["progress"][:2]


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Flattens dictionaries and lists."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        yield name, value
        return
    for key, part in parts:
        yield from leaves(f"{name}/{key}", part)


def equal(one: Any, two: Any) -> bool:
    """Returns True if two leaves hold the same bits."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    return type(one) is type(two) and bool(one == two)


if __name__ == "__main__":
    sys.exit(main())
