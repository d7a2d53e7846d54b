"""Generation equals transformers and plain decoding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.trees import Chain, DynamicTree
from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Engine, GenerationOutput, Request
from aquiline.sampling import SamplingParams
from tests import tiny
from tests.knowing_drafter import KnowingDrafter, known_from

PROMPTS = tiny.prompts(3, seed=4, longest=30)
LENGTH = 24


@cache
def hf_text(family: str, prompt: tuple[int, ...], count: int, **settings: Any) -> list[int]:
    tokens = torch.tensor([prompt])
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    out = tiny.hf_model(family).generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    return out[0, len(prompt) :].tolist()


def knowing(family: str, error: float = 0.3, **settings: Any) -> KnowingDrafter:
    texts = [[*prompt, *hf_text(family, tuple(prompt), LENGTH + 8)] for prompt in PROMPTS]
    return KnowingDrafter(known_from(texts), tiny.VOCAB, error=error, **settings)


DRAFTERS: dict[str, Callable[[str], Drafter | None]] = {
    "plain": lambda family: None,
    "knowing": knowing,
    "lookup": lambda family: PromptLookup(depth=3, min_ngram=1, num_branches=2),
    "eagle-chain": lambda family: EagleDrafter(tiny.head("eagle"), tiny.decoder(family), Chain(depth=3)),
    "eagle3-tree": lambda family: EagleDrafter(tiny.head("eagle3"), tiny.decoder(family), DynamicTree(8, 3, 3)),
}


def engine(family: str, drafter: str, *, rows: int = 3, end_ids: tuple[int, ...] = ()) -> Engine:
    return Engine(tiny.decoder(family), DRAFTERS[drafter](family), None, end_ids, max_rows=rows)


def outputs(engine: Engine, params: SamplingParams, prompts: Sequence[list[int]] = PROMPTS) -> list[GenerationOutput]:
    return generate_requests(engine, [Request(prompt, params) for prompt in prompts])


@pytest.mark.oracle
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("family", "drafter"), [*(("llama", name) for name in DRAFTERS), ("mistral", "knowing"), ("mistral", "eagle3-tree")]
)
def test_stops_as_transformers_does(family: str, drafter: str, rows: int) -> None:
    texts = [hf_text(family, tuple(prompt), LENGTH) for prompt in PROMPTS]
    first, second = texts[0][5], texts[1][11]
    cases = [
        (SamplingParams(max_new_tokens=LENGTH), (), {}),
        (SamplingParams(max_new_tokens=LENGTH), (first, second), {"eos_token_id": (first, second)}),
        (SamplingParams(max_new_tokens=LENGTH, stop_token_ids=(second,)), (first,), {"eos_token_id": (first, second)}),
        (SamplingParams(max_new_tokens=LENGTH, ignore_eos=True), (first, second), {}),
        (
            SamplingParams(max_new_tokens=LENGTH, min_new_tokens=8),
            (first, second),
            {"eos_token_id": (first, second), "min_new_tokens": 8},
        ),
    ]
    accepted = drafted = 0
    for params, end_ids, settings in cases:
        made = outputs(engine(family, drafter, rows=rows, end_ids=end_ids), params)
        for prompt, output in zip(PROMPTS, made, strict=True):
            assert output.token_ids == hf_text(family, tuple(prompt), LENGTH, **settings)
            accepted, drafted = accepted + output.stats.accepted, drafted + output.stats.nodes
    if drafter == "knowing":
        assert 0 < accepted < drafted, "both acceptance and rejection must happen"


class _NoRepeat(LogitsProcessor):
    """Bars the last three tokens: depends on each node's own prefix."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -3:], -torch.inf)


@pytest.mark.oracle
@pytest.mark.parametrize("drafter", ["plain", "knowing", "eagle3-tree"])
def test_penalties_and_processors_as_transformers_has_them(drafter: str) -> None:
    processor = _NoRepeat()
    params = SamplingParams(
        max_new_tokens=LENGTH, repetition_penalty=1.3, min_new_tokens=3, logits_processors=(processor,)
    )
    settings = {"repetition_penalty": 1.3, "logits_processor": LogitsProcessorList([processor])}
    for prompt in PROMPTS:
        expected = hf_text.__wrapped__("llama", tuple(prompt), LENGTH, **settings)
        made = engine("llama", drafter)
        if drafter == "knowing":
            made = replace(made, drafter=KnowingDrafter(known_from([[*prompt, *expected]]), tiny.VOCAB))
        (output,) = outputs(made, params, [prompt])
        assert output.token_ids == expected
        assert drafter != "knowing" or 0 < output.stats.accepted < output.stats.nodes


SETTINGS = {
    "temperature": SamplingParams(max_new_tokens=LENGTH, temperature=0.8, seed=5),
    "filters": SamplingParams(max_new_tokens=LENGTH, temperature=1.2, top_k=20, top_p=0.9, min_p=0.02, seed=6),
    "penalties": SamplingParams(
        max_new_tokens=LENGTH,
        temperature=0.9,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={3: 2.0, 5: -3.0},
        seed=7,
    ),
    "greedy-penalties": SamplingParams(max_new_tokens=LENGTH, presence_penalty=0.4, frequency_penalty=0.3, seed=1),
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("drafter", ["knowing", "lookup", "eagle3-tree"])
def test_seeded_sampling_is_plain_decoding_token_for_token(drafter: str, name: str) -> None:
    params = SETTINGS[name]
    requests = [Request(prompt, replace(params, seed=i)) for i, prompt in enumerate(PROMPTS)]
    expected = generate_requests(engine("llama", "plain", rows=1), requests)
    made = engine("llama", drafter)
    if drafter == "knowing":
        texts = [[*o.prompt_tokens, *o.token_ids] for o in expected]
        made = replace(made, drafter=KnowingDrafter(known_from(texts), tiny.VOCAB))
    found = generate_requests(made, requests)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    if drafter == "knowing":
        assert 0 < sum(o.stats.accepted for o in found) < sum(o.stats.nodes for o in found)


@pytest.mark.oracle
@pytest.mark.parametrize("drafter", ["plain", "knowing"])
def test_logprobs_are_the_models(drafter: str) -> None:
    params = SamplingParams(max_new_tokens=12, logprobs=3, repetition_penalty=1.1)
    for prompt, output in zip(PROMPTS, outputs(engine("llama", drafter), params), strict=True):
        tokens = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            logits = tiny.hf_model("llama")(tokens).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert output.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
        assert output.top_logprobs is not None
        for best, row in zip(output.top_logprobs, expected, strict=True):
            values, ids = row.topk(3)
            assert best == pytest.approx(dict(zip(ids.tolist(), values.tolist(), strict=True)), abs=1e-4)
