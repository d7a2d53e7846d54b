"""Grammar-constrained output: what is promised, exactly as in plain decoding."""

import builtins
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from aquiline.engine.generate import generate_requests
from aquiline.engine.grammar import Grammar, json_schema, lark, regex
from aquiline.engine.request import Engine, Request
from aquiline.loading import Loaded
from aquiline.sampling import SamplingParams
from tests.knowing_drafter import KnowingDrafter, known_from
from tests.path_target import PathTarget
from tests.tiny_tokenizers import every_byte

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["cat", "dog", "😀"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
PATTERN = r"(yes|no|maybe é)( [0-9]{1,4}){2}"
LARK = 'start: item ("," item)? "."\nitem: "ab" | "(" item ")"\n'


def engine(drafter: Any = None, **settings: Any) -> Engine:
    tokenizer = every_byte()
    return Engine(PathTarget(len(tokenizer) + 6, 512), drafter, tokenizer, (0,), **settings)


def params(grammar: Grammar, **settings: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=200, logits_processors=(grammar,), **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("error", [None, 0.0, 0.4])
def test_the_promise_holds_and_speculation_changes_nothing(temperature: float, error: float | None) -> None:
    plain = engine()
    grammars = [json_schema(plain, SCHEMA), regex(plain, PATTERN), lark(plain, LARK)]
    requests = [
        Request([3 + i, 4], params(grammar, temperature=temperature, seed=i, n=2)) for i, grammar in enumerate(grammars)
    ]
    expected = generate_requests(plain, requests)
    if error is not None:
        # The draft is right about the constrained text, and wrong or not grammatical elsewhere.
        texts = [[*o.prompt_tokens, *o.token_ids, 9, 9, 9, 9] for o in expected]
        drafter = KnowingDrafter(known_from(texts), 258, error=error, depth=6)
        found = generate_requests(engine(drafter, max_rows=4), requests)
        assert sum(o.stats.accepted for o in found) > 0
    else:
        found = generate_requests(engine(max_rows=1), requests)
    assert [(o.token_ids, o.text) for o in found] == [(o.token_ids, o.text) for o in expected]
    assert {o.finish_reason for o in found} == {"eos"}
    for output in found[:2]:
        value = json.loads(output.text)
        assert set(value) == {"age", "kind"} and 0 <= value["age"] <= 99
        assert value["kind"] in ("cat", "dog", "😀")
    assert all(re.fullmatch(PATTERN, output.text) for output in found[2:4])
    assert all(re.fullmatch(r"\(*ab\)*(,\(*ab\)*)?\.", output.text) for output in found[4:])


def ids(text: str) -> list[int]:
    tokens: list[int] = every_byte()(text, add_special_tokens=False)["input_ids"]
    return tokens


def allowed_after(processor: Any, prompt: Sequence[int], output: Sequence[int]) -> set[str]:
    scores = processor(torch.tensor([[*prompt, *output]]), torch.zeros(1, 264))
    return {every_byte().convert_ids_to_tokens(i) for i in torch.isfinite(scores[0]).nonzero()[:, 0].tolist()}


def test_the_processor_follows_any_order_of_texts() -> None:
    processor = regex(engine(), "ab(c|d)e?").for_request(2)
    prompt = [7, 7]
    assert allowed_after(processor, prompt, []) == {"a"}
    assert allowed_after(processor, prompt, ids("ab")) == {"c", "d"}
    assert allowed_after(processor, prompt, ids("abd")) == {"e", "<eos>"}
    assert allowed_after(processor, prompt, ids("abc")) == {"e", "<eos>"}
    assert allowed_after(processor, prompt, ids("a")) == {"b"}
    assert allowed_after(processor, prompt, ids("abce")) == {"<eos>"}
    assert allowed_after(processor, prompt, ids("x")) == {"<eos>"}, "a text that the grammar does not know can only end"
    assert allowed_after(processor, prompt, [*ids("abce"), 0]) == {"<eos>"}
    assert allowed_after(processor, prompt, ids("ab")) == {"c", "d"}


def test_the_grammar_goes_before_other_settings() -> None:
    made = engine()
    settings = params(regex(made, "ab"), min_new_tokens=5, seed=1)
    (output,) = generate_requests(made, [Request([3], settings)])
    assert output.token_ids == [*ids("ab"), 0, 0, 0, 0] and output.text == "ab"


def test_what_is_refused() -> None:
    made = engine()
    with pytest.raises(ValueError, match="cannot be used"):
        regex(made, "a(")
    with pytest.raises(ValueError, match="cannot be used"):
        json_schema(made, {"type": "unheard-of"})
    with pytest.raises(ValueError, match="cannot be used"):
        lark(made, "start: nothing")
    with pytest.raises(ValueError, match="tokenizer"):
        regex(replace(made, tokenizer=None), "a")
    with pytest.raises(ValueError, match="end_ids"):
        regex(replace(made, end_ids=()), "a")
    with pytest.raises(TypeError, match=r"is a Loaded; allowed: an Engine.*loaded\.engine"):
        regex(Loaded(made, None, "plain", SamplingParams()), "a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="source is 5; allowed: a text"):
        regex(made, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not JSON.*json\.dumps"):
        json_schema(made, {"type": {1}})


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **settings: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *args, **settings)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"aquiline\[grammar\]"):
        regex(engine(), "a")
