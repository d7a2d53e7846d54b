"""Proves renewal on a real shift: a head that served translations and summaries learns from them.

    python -m benchmarks.renewal WORK --data sets/regen --questions QUESTIONS --output renewal.json

Of the questions of `SERVED`, every other one is served: as often as `--answers` says, once greedily and else at
temperature 0.7. The head is renewed from these conversations by the code that the server runs. The questions that were
not served, and those of `KEPT`, are measured with both heads: acceptance of teacher-forced chains on plain decoding's
answers, and forwards of the target and CPU seconds of one thread with chains, by turns on every question. Each answer
is compared with plain decoding's. A second renewal, whose store holds random tokens, must not change the head.

The gain in speed has three estimates. Both heads have the same sizes, draft chains of one length and emit the same
tokens, so a forward costs the same with either, and tokens/s grow as tokens per forward do: forwards are counted, not
timed, so nothing but the choice of questions is left to chance. The gate's forecast counts a chain below every token,
not only where the engine's chains happen to begin. Tokens per CPU second assume nothing, and carry the noise of timing.

`--stage` runs one part; each continues where it was stopped. Without `--questions`, the embedded questions are used:
too few to prove anything.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aquiline
from aquiline.bench.environment import environment
from aquiline.bench.methods import Bed
from aquiline.bench.tasks import TITLES, Question, load_questions
from aquiline.check.forced import capture, forced_chains
from aquiline.check.intervals import alphas, difference
from aquiline.check.readings import as_stored, features_of
from aquiline.checkpoints.open import open_head, stored_eagle
from aquiline.drafters.trees import Chain
from aquiline.engine.text import encode_prompt
from aquiline.loading import Loaded
from aquiline.renew.gate import Chains, gain
from aquiline.renew.settings import open_renewal, read_settings
from aquiline.renew.slices import advance, train_settings
from aquiline.renew.store import ConversationStore, read_store
from aquiline.renew.versions import events, versions

SERVED, KEPT = ("translation", "sum"), ("mt_bench",)
"""Tasks that are served and measured, and tasks that are measured only."""

DEPTH = 4
"""Length of the chains; the server's longest."""

TOKENS, STEPS, SECONDS = 0, 1, 2
"""Places in the counts of a measured answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of the renewals and of what was measured")
    parser.add_argument("--stage", choices=STAGES, nargs="+", default=list(STAGES), help="default: all")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--data", nargs="+", metavar="SET", default=[], help="training sets of the original mixture")
    parser.add_argument("--questions", type=Path, help="folder of question files (default: the embedded ones)")
    parser.add_argument("--answers", type=int, default=2, help="answers to each served question (default: 2)")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer (default: 128)")
    parser.add_argument("--positions", type=int, help="positions of the training (default: the server's recipe)")
    parser.add_argument(
        "--workers", type=int, default=1, help="threads of the training, which do not change its result (default: 1)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--picture", type=Path, help="PNG file to draw (pip install matplotlib)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for stage in options.stage:
        STAGES[stage](options)


def questions(options: argparse.Namespace) -> tuple[list[Question], list[Question]]:
    """Questions to serve, the tasks by turns, and questions to measure."""
    sources = () if options.questions is None else (options.questions,)
    by_task = [load_questions(sources, (task,)) for task in SERVED]
    served = [question for pair in zip(*(found[::2] for found in by_task), strict=True) for question in pair]
    held = [question for found in by_task for question in found[1::2]]
    return served, [*held, *load_questions(sources, KEPT)]


def serve(options: argparse.Namespace) -> None:
    """Answers the questions that are served, and keeps the conversations as the server does."""
    folder = options.work / "renewal"
    loaded = aquiline.load(options.target, max_rows=options.answers)
    if not (folder / "conversations").is_dir():
        begin(loaded, folder, options)
    asked = {each.tokens[: each.prompt_length] for each in read_store(folder / "conversations")}
    store = ConversationStore(folder / "conversations")
    for question in questions(options)[0]:
        prompt = encode_prompt(loaded.tokenizer, asked_of(question))
        if tuple(prompt) in asked:
            continue
        usual = {"max_new_tokens": options.tokens}
        sampled = usual | {"temperature": 0.7, "seed": 0, "n": options.answers - 1}
        outputs = [loaded.generate(prompt, temperature=0.0, **usual)]
        if options.answers > 1:
            outputs += loaded.generate([prompt], **sampled)
        for output in outputs:
            store.add(output.prompt_tokens, output.token_ids)


def begin(loaded: Loaded, folder: Path, options: argparse.Namespace) -> None:
    """Begins a renewal, as the server does."""
    assert loaded.head is not None and loaded.target_path is not None
    recipe = {"workers": options.workers}
    if options.positions is not None:
        recipe |= {"total_positions": options.positions, "warmup_positions": options.positions // 20}
    made = {"data": tuple(options.data), "depth": DEPTH, "train": recipe}
    open_renewal(folder, loaded.target_path, loaded.head.path, made)


def poison(options: argparse.Namespace) -> None:
    """Renews from a store of random tokens."""
    folder = options.work / "poisoned"
    if not (folder / "conversations").is_dir():
        loaded = aquiline.load(options.target)
        begin(loaded, folder, options)
        store, generator = ConversationStore(folder / "conversations"), np.random.default_rng(0)
        size = loaded.target.shape.vocab_size
        for _ in range(80):
            tokens = generator.integers(0, size, 100).tolist()
            store.add(tokens[:20], tokens[20:])
    finish(folder)


def finish(folder: Path) -> None:
    """Does the stages of a candidate that are left."""
    began = time.monotonic()
    while not any(event["event"] in ("swap", "rejected") for event in events(folder)):
        if (folder / "training" / "set" / "manifest.json").is_file():
            settings = train_settings(folder, read_settings(folder))
            (folder / "recipe.json").write_text(json.dumps(asdict(settings)))
        stage = advance(folder)
        print(stage, f"{time.monotonic() - began:.0f} s", flush=True)
        if stage == "train" and not (folder / "training" / "run" / "head" / "README.md").is_file():
            raise SystemExit("a signal ended the training; run the same command again to resume")


def accept(options: argparse.Namespace) -> None:
    """Drafts with both heads on plain decoding's answers, by the forward of training."""
    file = options.work / "accepted.jsonl"
    done = {tuple(row["question"]) for row in rows(file)}
    plain = aquiline.load(options.target, None)
    heads = both(options)
    readings = [as_stored(stored_eagle(open_head(head, plain.target.shape))) for head in heads]
    for question in questions(options)[1]:
        if (question.task, question.id) in done:
            continue
        output = plain.generate(asked_of(question), max_new_tokens=options.tokens, temperature=0.0)
        text = [*output.prompt_tokens, *output.token_ids]
        answer = capture(plain.target, text, len(output.prompt_tokens), features_of(readings))
        chains = [forced_chains(each, [answer], plain.target, DEPTH)[0] for each in readings] if answer.starts else []
        kept = [[chain.accepted.tolist(), chain.offered.tolist()] for chain in chains]
        add(file, question, {"answer": output.token_ids, "chains": kept})


def measure(options: argparse.Namespace) -> None:
    """Measures chains of both heads on one question after the other, the tasks by turns."""
    file = options.work / "measured.jsonl"
    done = {tuple(row["question"]) for row in rows(file)}
    answers = {tuple(row["question"]): row["answer"] for row in rows(options.work / "accepted.jsonl")}
    torch.set_num_threads(1)
    names = ["old", "new"]
    # Of one length: the default drafts depend on costs that each load measures anew.
    tree = Chain(DEPTH)
    drafts = {
        name: aquiline.load(options.target, head, tree=tree) for name, head in zip(names, both(options), strict=True)
    }
    by_task = [[each for each in questions(options)[1] if each.task == task] for task in (*SERVED, *KEPT)]
    for number, question in enumerate(each for turn in zip_longest(*by_task) for each in turn if each is not None):
        key = (question.task, question.id)
        if key in done:
            continue
        found = {name: timed(drafts[name], question, options.tokens) for name in names[:: 1 - number % 2 * 2]}
        speeds = {name: counts for name, (_, *counts) in found.items()}
        equal = [name for name, (output, *_) in found.items() if output == answers[key]]
        add(file, question, {"speeds": speeds, "equal": equal})


def timed(loaded: Loaded, question: Question, tokens: int) -> tuple[list[int], int, int, float]:
    """The output, its tokens after the prompt's forward, and the forwards and CPU seconds that they took."""
    output, steps, first, began = list[int](), 0, 0, 0.0
    for event in loaded.stream(asked_of(question), max_new_tokens=tokens, temperature=0.0):
        output += event.token_ids
        if not first:
            first, began = len(output), time.process_time()
        if event.output is not None:
            steps = event.output.stats.steps
    return output, len(output) - first, steps, time.process_time() - began


def both(options: argparse.Namespace) -> list[Path]:
    """Folders of the served head and of the renewed one."""
    found = [version.folder for version in versions(options.work / "renewal")]
    if len(found) < 2:
        raise SystemExit(f"the gate served no other head: {events(options.work / 'renewal')[-1]}")
    return found[:2]


def asked_of(question: Question) -> list[dict[str, str]]:
    """The first turn."""
    return [{"role": "user", "content": question.turns[0]}]


def add(file: Path, question: Question, facts: dict[str, Any]) -> None:
    """Appends a line about a question."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"question": (question.task, question.id), **facts}) + "\n")


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a file, if there is one."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return


def report(options: argparse.Namespace) -> None:
    """Summarises by task, and prints a table."""
    folder = options.work / "renewal"
    accepted, speeds = (list(rows(options.work / name)) for name in ("accepted.jsonl", "measured.jsonl"))
    store = read_store(folder / "conversations")
    loaded = aquiline.load(options.target, None)
    bed = Bed(loaded.target, loaded.tokenizer, loaded.engine.end_ids, loaded.target_path, options.target, {})
    tasks = {
        task: summary(*([row for row in found if row["question"][0] == task] for found in (accepted, speeds)))
        for task in (*SERVED, *KEPT)
    }
    recipe = json.loads((folder / "recipe.json").read_text())
    served = ([row for row in found if row["question"][0] in SERVED] for found in (accepted, speeds))
    result = {
        "environment": environment(bed),
        "served": {
            "conversations": len(store),
            "prompt_tokens": sum(each.prompt_length for each in store),
            "answer_tokens": sum(len(each.tokens) - each.prompt_length for each in store),
        },
        "recipe": {
            name: value
            for name, value in recipe.items()
            if name not in ("target", "data", "output", "init", "validation")
        },
        "events": [shown(event) for event in events(folder)],
        "verdict": dict(versions(folder)[-1].verdict),
        "card": (versions(folder)[-1].folder / "README.md").read_text(encoding="utf-8"),
        "poisoned": [shown(event) for event in events(options.work / "poisoned")],
        "tasks": tasks,
        "served_tasks": gains(*served),
    }
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if options.picture is not None:
        draw(result, options.picture)
    for task, each in tasks.items():
        print(task, json.dumps(each["alphas"]), json.dumps(each["gains"]), f"{each['equal']} of {each['outputs']}")
    print(*SERVED, json.dumps(result["served_tasks"]))


def draw(result: dict[str, Any], picture: Path) -> None:
    """Draws n-α of both heads by task, with 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, frames = plt.subplots(1, len(result["tasks"]), figsize=(9, 3.2), sharey=True, layout="constrained")
    for axes, (task, each) in zip(frames, result["tasks"].items(), strict=True):
        for place, (name, label) in enumerate((("old", "before"), ("new", "after"))):
            rates = each["alphas"][name]
            depths = [n + 0.12 * place for n in range(len(rates))]
            errors = [[rate["value"] - rate["low"] for rate in rates], [rate["high"] - rate["value"] for rate in rates]]
            axes.errorbar(depths, [rate["value"] for rate in rates], errors, fmt="o-", capsize=3, label=label)
        axes.set(title=TITLES[task], xlabel="n", ylim=(0, 1), xticks=range(DEPTH))
    frames[0].set_ylabel("n-α (greedy)")
    frames[0].legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def shown(event: dict[str, Any]) -> dict[str, Any]:
    """An event without its time."""
    return {name: value for name, value in event.items() if name != "time"}


def summary(accepted: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance and speeds of both heads over questions."""
    counts = chains_of(accepted)
    first = [[int((a > 0).sum()) for a in head] for head, _ in counts]
    more = [new - old for old, new in zip(*first, strict=True)]
    return {
        "questions": {"acceptance": len(accepted), "speed": len(found)},
        "alphas": {name: [asdict(r) for r in alphas(*c)] for name, c in zip(("old", "new"), counts, strict=True)},
        "gain_of_0_alpha": asdict(difference(more, [len(each) for each in counts[0][0]])),
        "tokens_per_step": {name: per(found, name, TOKENS, STEPS) for name in ("old", "new")},
        "tokens_per_cpu_second": {name: per(found, name, TOKENS, SECONDS) for name in ("old", "new")},
        "gains": gains(accepted, found),
        "outputs": sum(len(row["speeds"]) for row in found),
        "equal": sum(len(row["equal"]) for row in found),
    }


def chains_of(accepted: Sequence[dict[str, Any]]) -> list[Chains]:
    """Accepted and judged drafts by question: of the old head, and of the new one."""
    judged = [row["chains"] for row in accepted if row["chains"]]
    return [([np.array(row[i][0]) for row in judged], [np.array(row[i][1]) for row in judged]) for i in range(2)]


def gains(accepted: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """New over old, less 1, with the ends of its 95 % interval, for which questions are drawn with replacement."""
    forecast = gain(*chains_of(accepted), DEPTH)
    return {
        "tokens_per_step": ratio_of(found, TOKENS, STEPS),
        "forecast_of_tokens_per_step": [forecast.gain, forecast.low, forecast.high],
        "tokens_per_cpu_second": ratio_of(found, TOKENS, SECONDS),
        "steps_per_cpu_second": ratio_of(found, STEPS, SECONDS),  # the estimates by steps rest on a gain of 0
    }


def per(found: Sequence[dict[str, Any]], name: str, what: int, unit: int) -> float:
    """Tokens or steps of a head, per step or CPU second, over all questions."""
    counts = np.array([row["speeds"][name] for row in found])
    return float(counts[:, what].sum() / counts[:, unit].sum())


def ratio_of(found: Sequence[dict[str, Any]], what: int, unit: int) -> list[float]:
    """Gain of a rate, with its interval."""
    generator, drawn = np.random.default_rng(0), []
    for _ in range(2000):
        chosen = [found[i] for i in generator.integers(0, len(found), len(found))]
        drawn.append(per(chosen, "new", what, unit) / per(chosen, "old", what, unit) - 1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return [per(found, "new", what, unit) / per(found, "old", what, unit) - 1, float(low), float(high)]


STAGES = {
    "serve": serve,
    "renew": lambda options: finish(options.work / "renewal"),
    "poison": poison,
    "accept": accept,
    "measure": measure,
    "report": report,
}
"""Stage → what does it."""


if __name__ == "__main__":
    main()
