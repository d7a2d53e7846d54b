"""From conversations to a draft head in a minute: too short a training for a good head, but every step is there."""

import json
import tempfile
from pathlib import Path

import aquiline
from aquiline.models.resolve import resolve_target
from aquiline.training.data.prepare import prepare
from aquiline.training.loop import train
from aquiline.training.settings import TrainSettings

TOPICS = ("bees", "rivers", "bread", "clocks", "maps", "wool", "salt", "bridges", "owls", "glass", "tea", "kites")


def main(folder: Path) -> None:
    """Trains on the target's own words about a few things."""
    target = resolve_target("smollm2")
    questions = [f"Write two sentences about {topic}." for topic in TOPICS]
    answers = aquiline.load("smollm2", draft=None, max_rows=12).generate(questions, max_new_tokens=48)
    lines = [
        json.dumps({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a.text}]})
        for q, a in zip(questions, answers, strict=True)
    ]
    (folder / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    print(prepare(folder / "chats.jsonl", target, folder / "data", max_length=256, validation_fraction=0.2))
    settings = TrainSettings(
        target=str(target),
        data=(str(folder / "data"),),
        output=str(folder / "run"),
        draft_vocab_size=1024,
        ttt_steps=2,
        total_positions=4_000,
        batch_positions=1_000,
        warmup_positions=500,
    )
    report = train(settings)
    print(f"{report.positions:,} positions, acceptance {report.acceptance}")
    model = aquiline.load("smollm2", folder / "run", adaptive=False)
    output = model.generate("Write two sentences about rain.", max_new_tokens=32)
    print(f"{output.text}\n{output.stats.mean_accept_length:.2f} tokens per forward with the new head")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
