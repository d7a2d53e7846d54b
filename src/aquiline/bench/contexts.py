"""Puts questions behind long texts, to measure what a long context costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aquiline.bench.tasks import Question

_SPARE = 64
"""Tokens of a chat template around a prompt, which a length leaves room for."""


def in_contexts(questions: Sequence[Question], lengths: Sequence[int], tokenizer: Any) -> list[Question]:
    """Returns the questions at each length: "TASK@LENGTH" with the first turns alone; 0 leaves them as they are.

    Args:
        lengths: of the prompts, in tokens.
        tokenizer: of the target.

    Raises:
        ValueError: if there is no other question to take texts from.
    """
    if any(lengths) and len(questions) < 2:
        raise ValueError(f"contexts are {list(lengths)}, but there is one question; give more, whose texts fill them")
    found = list[Question]()
    for length in dict.fromkeys(lengths):
        for question in questions:
            if length == 0:
                found.append(question)
                continue
            turn = behind(question, questions, length, tokenizer)
            found.append(replace(question, task=f"{question.task}@{length}", turns=(turn,)))
    return found


def behind(question: Question, others: Sequence[Question], length: int, tokenizer: Any) -> str:
    """Returns a question's first turn behind the texts of other questions, of about `length` tokens in all.

    The texts are taken in turn, from the one after the question on; the last is cut.

    Args:
        question: what is asked.
        others: questions whose texts fill the context; the question itself is passed over.
        length: of the prompt, in tokens; a longer question stays alone.
        tokenizer: of the target.
    """
    asked = question.turns[0]
    room = length - _SPARE - len(_tokens(tokenizer, asked))
    start = next((i for i, other in enumerate(others) if other == question), -1) + 1
    texts = [o.turns[0] for o in (*others[start:], *others[:start]) if o != question]
    if room < 1:
        return asked
    filling = list[int]()
    while len(filling) < room:
        for text in texts:
            filling += _tokens(tokenizer, text + "\n\n")
            if len(filling) >= room:
                break
    return f"{tokenizer.decode(filling[:room])}\n\n{asked}"


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
