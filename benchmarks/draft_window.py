"""Measures what an EAGLE head accepts behind long texts, if it sees all of them or their end alone.

    python benchmarks/draft_window.py QUESTIONS --output long-contexts/acceptance.json
    python benchmarks/draft_window.py --output long-contexts/acceptance.json --plot docs/long-contexts.png

Questions of `--tasks` stand behind other questions, up to each of `--lengths` tokens. The target answers greedily;
chains of 5 drafts begin at every token of the answers, teacher-forced, by training's forward in float32. A window of W
tokens cuts the text W tokens before the answer. `--plot` draws what was measured before, and needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import aquiline
from aquiline import tree as trees
from aquiline.bench.contexts import behind
from aquiline.bench.tasks import load_questions
from aquiline.check.forced import Answer, Forced, forced_chains
from aquiline.check.readings import Reading, as_stored
from aquiline.checkpoints.open import open_head, stored_eagle
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.engine.text import encode_prompt
from aquiline.targets.target import Feature, Target
from aquiline.tree import DraftTree

DEPTH = 5


class Listener:
    """Drafts nothing, and keeps the features of all committed tokens."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self.needs = Needs(features=tuple(features))
        self.heard: list[Tensor] = []

    def new_state(self, slots: int, capacity: int) -> None:
        self.heard.clear()

    def propose(self, rows: Rows, state: None) -> DraftTree:
        return trees.root_only(rows.roots)

    def extend(self, committed: Committed, state: None) -> None:
        assert committed.features is not None
        self.heard.append(committed.features[0, : committed.counts[0]].float().clone())

    def copy(self, source: int, slot: int, length: int, state: None) -> None:
        pass

    def reset(self, slot: int, length: int, state: None) -> None:
        pass


def cut(answer: Answer, window: int | None) -> Answer:
    """The answer and the last `window` tokens before it."""
    drop = 0 if window is None else max(0, answer.prompt_length - window)
    features = {name: rows[drop:] for name, rows in answer.features.items()}
    return Answer(answer.tokens[drop:], answer.prompt_length - drop, features)


def summary(forced: Sequence[Forced]) -> dict[str, Any]:
    """n-α and τ of a chain over all starts."""
    accepted = torch.cat([torch.from_numpy(f.accepted) for f in forced])
    offered = torch.cat([torch.from_numpy(f.offered) for f in forced])
    alphas = [int((accepted > n).sum()) / max(1, int((offered > n).sum())) for n in range(DEPTH)]
    return {"starts": len(accepted), "alpha": alphas, "tau": 1 + float(accepted.float().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, nargs="?", help="folder of question files")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2-eagle3")
    parser.add_argument("--tasks", nargs="+", default=["sum", "rag"])
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--lengths", nargs="+", type=int, default=[500, 2000, 4000, 7000])
    parser.add_argument("--windows", nargs="+", type=int, default=[256, 512, 1024, 2048])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the output instead")
    options = parser.parse_args()
    if options.plot is not None:
        plot(json.loads(options.output.read_text()), options.plot)
        return
    reading, listener, loaded = _parts(options.target, options.head)
    questions = load_questions([options.questions], options.tasks, options.per_task)
    others = load_questions([options.questions])
    found: dict[tuple[int, int | None], list[Forced]] = {}
    for question in questions:
        for length in options.lengths:
            turns = behind(question, others, length, loaded.engine.tokenizer)
            prompt = encode_prompt(loaded.engine.tokenizer, [{"role": "user", "content": turns}])
            answer = _answer(loaded, listener, prompt, options.new_tokens)
            for window in (None, *(w for w in options.windows if w < length)):
                chains = forced_chains(reading, [cut(answer, window)], loaded.engine.target, DEPTH)
                found.setdefault((length, window), []).extend(chains)
        rows = [{"length": n, "window": w} | summary(chains) for (n, w), chains in found.items()]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(question.task, question.id, flush=True)
    for row in rows:
        print(
            f"{row['length']:>6} {row['window']!s:>6}  τ {row['tau']:.3f}  0-α {row['alpha'][0]:.3f}  {row['starts']}"
        )


def plot(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draws τ against the length of the prompt, a line per window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for window in dict.fromkeys(row["window"] for row in rows):
        mine = [row for row in rows if row["window"] == window]
        name = "all positions" if window is None else f"the last {window:,}"
        axes.plot([row["length"] for row in mine], [row["tau"] for row in mine], "o-", label=name)
    axes.set(xlabel="tokens of the prompt", ylabel="τ, chain of 5, greedy", ylim=(1, None))
    axes.legend(fontsize=8, title="the head sees")
    figure.savefig(picture, dpi=110)


def _parts(target: str, head: str) -> tuple[Reading, Listener, Any]:
    plain = aquiline.load(target, draft=None)
    reading = as_stored(stored_eagle(open_head(head, plain.engine.target.shape)))
    listener = Listener((*reading.features, "final"))
    return reading, listener, aquiline.load(target, draft=listener)


def _answer(loaded: Any, listener: Listener, prompt: list[int], new_tokens: int) -> Answer:
    output = loaded.generate(prompt, max_new_tokens=new_tokens, temperature=0)
    target: Target = loaded.engine.target
    tokens = torch.tensor([*prompt, *output.token_ids])
    rows = torch.cat(listener.heard)[: len(tokens) - 1]
    assert len(rows) == len(tokens) - 1, "the features of all tokens but the last"
    parts = torch.split(torch.cat((rows, rows[-1:])), target.shape.hidden_size, dim=-1)
    return Answer(tokens, len(prompt), dict(zip(listener.needs.features, parts, strict=True)))


if __name__ == "__main__":
    main()
