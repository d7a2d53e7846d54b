"""Tells whether a head was trained with the chat template in its own folder, which the target does not use.

Answers under two templates cannot be compared: one that repeats itself accepts the most. So both templates stand before
the same answers, those that the target gives under its own; this favours the target's template. A head that was trained
with it comes closer to the target's distributions there, one that was trained with the other template does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.check.diagnosis import ERROR, LEAST
from aquiline.check.forced import Answer, Forced, capture, forced_chains
from aquiline.check.intervals import Rate, difference, signed_rank
from aquiline.check.readings import Reading, features_of
from aquiline.engine.template import apply_template
from aquiline.models.files import read_json
from aquiline.targets.target import Target

CLOSER = 0.02
"""Gain in the overlap of the draft's and the target's distributions that is named. Behind the template of its training,
`smollm2-eagle3` gained 0.03 to 0.1; behind others it lost as much."""


@dataclass(frozen=True)
class OtherTemplate:
    """The template in a head's folder, before the answers under the target's own.

    Attributes:
        gain: mean overlap of the draft's and the target's distributions, over that under the target's template; None
            for EAGLE-1/2 heads, if the template fails, or if fewer than `LEAST` answers were there.
        chance: probability of the gain if signs were chance.
    """

    gain: Rate | None = None
    chance: float = 1.0

    @property
    def clear(self) -> bool:
        """Whether the head was trained with it."""
        return self.gain is not None and self.chance < ERROR and self.gain.low > 0 and self.gain.value >= CLOSER


def other_template(head: Path, tokenizer: Any) -> str | None:
    """The chat template in a head's folder if it renders a turn unlike the target's, or not at all.

    Raises:
        ValueError: if it cannot be read.
    """
    template, file = None, head / "chat_template.jinja"
    if file.is_file():
        try:
            template = file.read_text(encoding="utf-8")
        except ValueError as error:
            raise ValueError(f"{file} is not UTF-8 ({error}); fetch it again, or remove it") from error
    elif (head / "tokenizer_config.json").is_file():
        template = read_json(head / "tokenizer_config.json").get("chat_template")
    if not isinstance(template, str) or not template or not getattr(tokenizer, "chat_template", None):
        return None
    turn = [{"role": "user", "content": "Why is the sky blue?"}]
    try:
        same = apply_template(tokenizer, turn) == apply_template(tokenizer, turn, template=template)
    except ValueError:
        same = False
    return None if same else template


def behind_prompts(
    prompts: Mapping[int, Sequence[int]], base: Reading, answers: Sequence[Answer], forced: Sequence[Forced],
    target: Target,
) -> OtherTemplate:  # fmt: skip
    """Drafts the answers again, behind other prompts.

    EAGLE-1/2 heads are not judged: they read the last feature alone, which hardly depends on the template, so that
    gains of either sign are chance.

    Args:
        prompts: index of an answer → its prompt under the head's template.
        base: the head as its files say.
        answers: behind the prompts under the target's template.
        forced: chains on them.
        target: the target.
    """
    gains, starts = list[float](), list[int]()
    judged = base.stored.config.kind == "eagle3"
    for number, (answer, before) in enumerate(zip(answers, forced, strict=True)):
        prompt = prompts.get(number)
        if judged and prompt and answer.starts:
            text = [*prompt, *answer.tokens[answer.prompt_length :].tolist()]
            behind = capture(target, text, len(prompt), features_of([base]))
            depths = len(before.drafts)
            (after,) = forced_chains(base, [behind], target, depths)
            gains.append((after.overlap - before.overlap) / depths)
            starts.append(answer.starts)
    if len(gains) < LEAST:
        return OtherTemplate()
    return OtherTemplate(difference(gains, starts), signed_rank(gains))
