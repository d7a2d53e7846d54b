"""The split into training and validation."""

from __future__ import annotations

from aquiline.training.data.messages import Message, in_validation


def test_the_split_is_by_prompt_and_stable() -> None:
    def held_out(prompt: str, answer: str, fraction: float = 0.3) -> bool:
        return in_validation([Message("user", prompt), Message("assistant", answer)], fraction)

    prompts = [f"Question {i}" for i in range(1000)]
    chosen = [prompt for prompt in prompts if held_out(prompt, "a")]
    assert 240 < len(chosen) < 360
    assert chosen == [prompt for prompt in prompts if held_out(prompt, "another answer")]
    assert {p for p in prompts if held_out(p, "a", 0.1)} < set(chosen)
    # Recorded: an upgrade must not move conversations across the split.
    assert chosen[:6] == RECORDED


RECORDED = [f"Question {i}" for i in (3, 6, 10, 12, 22, 29)]
