"""Prompts become tokens, or are rejected with the reason; and how far two sequences agree."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from aquiline.engine.text import common_prefix, encode_prompt
from tests.tiny_tokenizers import EOS, every_byte


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == common_prefix([1, 2, 3], [1, 2]) == 2
    assert common_prefix([], [1]) == common_prefix([2], [1]) == 0
    assert common_prefix([1, 2], (1, 2)) == 2


def test_text_goes_through_the_chat_template() -> None:
    tokenizer = every_byte()
    tokens = encode_prompt(tokenizer, "Hé")
    assert tokenizer.decode(tokens) == f"<turn>user: Hé{EOS}<turn>assistant: "
    assert tokens == encode_prompt(tokenizer, [{"role": "user", "content": "Hé"}])
    assert tokens.count(1) == 2, "special tokens of the template are tokens"


def test_raw_text_and_token_ids_stay_as_they_are() -> None:
    tokenizer = every_byte()
    assert tokenizer.decode(encode_prompt(tokenizer, "Hé", raw=True)) == "Hé"
    assert encode_prompt(tokenizer, [3, 1, 2]) == [3, 1, 2]
    assert encode_prompt(tokenizer, list(torch.tensor([3, 1]).numpy())) == [3, 1]
    assert encode_prompt(None, [3]) == [3]


def test_no_second_beginning_of_sequence() -> None:
    tokenizer = deepcopy(every_byte())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<turn> $A", special_tokens=[("<turn>", 1)])
    assert encode_prompt(tokenizer, "a", raw=True)[0] == 1, "this tokenizer adds a BOS"
    assert encode_prompt(tokenizer, "a")[:2] != [1, 1]
    tokenizer.chat_template = None
    assert encode_prompt(tokenizer, "a")[0] == 1, "without a template text is taken as it is"


def test_arrays_tensors_and_encodings_are_token_ids() -> None:
    tokenizer = every_byte()
    ids = encode_prompt(tokenizer, "Hé", raw=True)
    rows = [
        numpy.array(ids),
        torch.tensor(ids),
        torch.tensor([ids]),
        tokenizer("Hé"),
        tokenizer("Hé", return_tensors="pt"),
    ]
    assert [encode_prompt(tokenizer, row) for row in rows] == [ids] * len(rows)


def test_a_spelled_out_beginning_of_sequence_is_not_doubled() -> None:
    tokenizer = deepcopy(every_byte())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<turn> $A", special_tokens=[("<turn>", 1)])
    tokenizer.bos_token = "<turn>"
    assert encode_prompt(tokenizer, "<turn>a", raw=True) == encode_prompt(tokenizer, "a", raw=True)
    assert encode_prompt(tokenizer, "<turn><turn>a", raw=True)[:3] == [1, 1, tokenizer.convert_tokens_to_ids("a")]


def test_a_tokenizer_that_panics_is_named() -> None:
    class PanicException(BaseException):
        """Stands for that of pyo3, which derives from BaseException too."""

    class Panicking:
        chat_template = None

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise PanicException("regex: too many retries")

    with pytest.raises(ValueError, match=r"too many retries.*tokenizer\.json"):
        encode_prompt(Panicking(), "a")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


REJECTED: dict[str, tuple[Any, type[Exception], str]] = {
    "empty text": ("", ValueError, "empty.*BOS"),
    "no tokens": ([], ValueError, "empty.*BOS"),
    "half a character": ("\ud800", ValueError, "UTF-8"),
    "number": (7, TypeError, "not int"),
    "none": (None, TypeError, "list of token ids, not NoneType"),
    "bytes": (b"abc", TypeError, "not bytes"),
    "one message": (user("x")[0], TypeError, "not dict"),
    "set": ({1, 2}, TypeError, "not set"),
    "iterator": (iter([1, 2]), TypeError, "iterator"),
    "rows of ids": (torch.tensor([[1, 2], [3, 4]]), TypeError, "2 rows of token ids.*list of prompts"),
    "array of fractions": (numpy.array([1.5]), TypeError, "1.5.*list of integers"),
    "fraction": ([1.5], TypeError, "1.5.*list of integers"),
    "booleans": ([True, False], TypeError, "True.*list of integers"),
    "texts": (["a", "b"], TypeError, "'a'.*messages"),
    "no role": ([{"content": "x"}], TypeError, r"'content': 'x'.*allowed: \{'role'"),
    "role of another kind": ([{"role": 5, "content": "x"}], TypeError, "'role': 5.*allowed"),
    "content of another kind": (user(5), TypeError, "content 5; allowed: a text"),
    "part without a text": (user([{"type": "text"}]), ValueError, "'text'; allowed: text"),
    "image": (user([{"type": "image", "url": "x.png"}]), ValueError, "'image'; allowed: text"),
    "messages and texts": ([*user("x"), "y"], TypeError, r"'y'.*allowed: \{'role'"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected_prompts(case: str) -> None:
    prompt, error, words = REJECTED[case]
    with pytest.raises(error, match=words):
        encode_prompt(every_byte(), prompt)


def test_prompts_that_need_a_tokenizer_or_a_template() -> None:
    with pytest.raises(ValueError, match=r"no tokenizer.*token ids"):
        encode_prompt(None, "a")
    with pytest.raises(ValueError, match=r"chat template.*raw=True"):
        encode_prompt(None, user("a"))
