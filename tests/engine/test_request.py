"""Requests: their budgets, ends, failures and refusals."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import aquiline
from aquiline.drafters.lookup import PromptLookup
from aquiline.engine.generate import generate_requests, stream_requests
from aquiline.engine.request import Engine, GenerationOutput, Request
from aquiline.sampling import LossyRule, SamplingParams
from tests import tiny
from tests.knowing_drafter import KnowingDrafter, known_from
from tests.path_target import PathTarget
from tests.tiny_tokenizers import byte_level

VOCABULARY = len(byte_level())


def outputs(engine: Engine, params: SamplingParams, prompts: Sequence[list[int]]) -> list[GenerationOutput]:
    return generate_requests(engine, [Request(prompt, params) for prompt in prompts])


def path_engine(speculative: bool, context: int = 32, **settings: Any) -> Engine:
    target = PathTarget(VOCABULARY, context)
    drafter = None
    if speculative:

        def known(prefix: Sequence[int]) -> list[int]:
            text = list(prefix)
            for _ in range(6):
                text.append(int(target.logits(text).argmax()))
            return text[len(prefix) :]

        drafter = KnowingDrafter(known, VOCABULARY, depth=6, error=0.1)
    return Engine(target, drafter, byte_level(), settings.pop("end_ids", ()), **settings)


BOTH = pytest.mark.parametrize("speculative", [False, True])


@BOTH
@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
def test_the_budget_is_exact(speculative: bool, count: int) -> None:
    (output,) = outputs(path_engine(speculative), SamplingParams(max_new_tokens=count), [[3, 4]])
    assert (len(output.token_ids), output.finish_reason) == (count, "length")
    assert output.stats.emitted == count


@BOTH
def test_the_context_is_exact(speculative: bool) -> None:
    for size in (1, 20, 30, 31):
        made = path_engine(speculative)
        (output,) = outputs(made, SamplingParams(max_new_tokens=100), [[3] * size])
        assert (size + len(output.token_ids), output.finish_reason) == (32, "length")


@BOTH
def test_drafts_stay_within_the_budget_and_the_context(speculative: bool) -> None:
    made = path_engine(speculative)
    short, long = [3, 4], [5] * 29
    found = generate_requests(
        made, [Request(short, SamplingParams(max_new_tokens=9)), Request(long, SamplingParams(max_new_tokens=90))]
    )
    assert [len(output.token_ids) for output in found] == [9, 3]
    assert made.target.furthest < 32  # type: ignore[attr-defined]
    if isinstance(made.drafter, KnowingDrafter):
        # After the first tokens 8 are left to one: the 2 that the other's context holds do not limit it.
        assert made.drafter.deepest[0] == max(depth or 0 for depth in made.drafter.deepest) == 7
    alone = path_engine(speculative)
    outputs(alone, SamplingParams(max_new_tokens=9), [[3, 4]])
    if isinstance(alone.drafter, KnowingDrafter):
        assert alone.drafter.deepest[0] == max(depth or 0 for depth in alone.drafter.deepest) == 7


@BOTH
def test_requests_that_cannot_fit_are_rejected_before_any_work(speculative: bool) -> None:
    made = path_engine(speculative)
    good = Request([3], SamplingParams(max_new_tokens=2))
    for tokens, settings, words in (
        ([3] * 32, {}, "32.*no room.*31"),
        ([3] * 33, {"max_new_tokens": 0}, "33 tokens"),
        ([3] * 30, {"min_new_tokens": 5, "max_new_tokens": 9}, "no room for 5"),
        ([], {}, "empty"),
        ([VOCABULARY], {}, f"0 … {VOCABULARY - 1}"),
        ([-1], {}, "-1"),
        ([3], {"stop_token_ids": (999,)}, "stop_token_ids has token id 999"),
        ([3], {"logit_bias": {999: 1.0}}, "logit_bias has token id 999"),
        ([3], {"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens is 9"),
    ):
        with pytest.raises(ValueError, match=words):
            stream_requests(made, [good, Request(tokens, SamplingParams(**settings))])
    assert made.target.widths == []  # type: ignore[attr-defined]


def test_settings_without_what_they_need_are_rejected() -> None:
    made = path_engine(False)
    with pytest.raises(ValueError, match="need a tokenizer"):
        stream_requests(replace(made, tokenizer=None), [Request([3], SamplingParams(stop=("a",)))])
    with pytest.raises(ValueError, match="temperature > 0"):
        stream_requests(replace(made, lossy=LossyRule("typical")), [Request([3])])
    with pytest.raises(ValueError, match="max_rows is 0"):
        replace(made, max_rows=0)


@BOTH
def test_no_new_tokens(speculative: bool) -> None:
    made = path_engine(speculative)
    prompts = [[3], [3] * 32]
    for output in outputs(made, SamplingParams(max_new_tokens=0), prompts):
        assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
    assert made.target.widths == []  # type: ignore[attr-defined]


@BOTH
def test_the_first_token_may_be_the_end(speculative: bool) -> None:
    made = path_engine(speculative)
    end = int(made.target.logits([3, 4]).argmax())  # type: ignore[attr-defined]
    (output,) = outputs(replace(made, end_ids=(end,)), SamplingParams(max_new_tokens=9), [[3, 4]])
    assert (output.token_ids, output.text, output.finish_reason) == ([end], "", "eos")


def test_no_requests() -> None:
    assert generate_requests(path_engine(False), []) == []


# -- seeds and samples -------------------------------------------------------------------------


def test_a_fresh_seed_is_recorded_and_repeats_the_output() -> None:
    made, params = path_engine(False), SamplingParams(max_new_tokens=20, temperature=1.0)
    first, second = (outputs(made, params, [[3, 4]])[0] for _ in range(2))
    assert first.seed != second.seed and first.token_ids != second.token_ids
    (again,) = outputs(made, replace(params, seed=first.seed), [[3, 4]])
    assert again.token_ids == first.token_ids


@BOTH
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_samples_of_one_prompt(speculative: bool, rows: int) -> None:
    made = path_engine(speculative, 128, max_rows=rows)
    prompt = [3 + i % 30 for i in range(60)]
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=9, n=4)
    found = generate_requests(made, [Request(prompt, params), Request([4, 5], replace(params, n=1))])
    assert len(found) == 5 and len({tuple(o.token_ids) for o in found[:4]}) == 4
    for output in found:
        alone = outputs(path_engine(False, 128), replace(params, n=1, seed=output.seed), [output.prompt_tokens])
        assert alone[0].token_ids == output.token_ids
    assert found[0].seed == 9
    wide = [width for _, width in made.target.widths if width > 13]  # type: ignore[attr-defined]
    assert wide == [len(prompt)], "the prompt of all samples is computed once"


# -- statistics --------------------------------------------------------------------------------


@BOTH
def test_stats_are_those_of_the_request(speculative: bool) -> None:
    made = path_engine(speculative)
    found = generate_requests(
        made, [Request([3, 4, 5], SamplingParams(max_new_tokens=c)) for c in (4, 12)] + [Request([6], SamplingParams())]
    )
    for output in found:
        assert output.stats.emitted == len(output.token_ids)
        assert output.stats.prompt_tokens == len(output.prompt_tokens)
        assert output.stats.tokens_per_second > 0
        # The first token comes from the prefill.
        assert output.stats.steps + output.stats.accepted == len(output.token_ids) - 1
        assert set(output.stats.seconds) >= {"prefill", "draft", "target", "accept", "commit"}
    assert speculative == any(output.stats.accepted for output in found)


def test_barring_every_token_is_rejected() -> None:
    bars = dict.fromkeys(range(tiny.VOCAB), -math.inf)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logit_bias=bars)
        with pytest.raises(ValueError, match="every token"):
            made = Engine(tiny.decoder("llama"), PromptLookup(min_ngram=1), None, ())
            generate_requests(made, [Request([1, 2], params)])


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"presence_penalty": 0.1}])
def test_nan_logits_are_never_a_token(settings: dict[str, Any]) -> None:
    """The NaN arises after the first token, where a whole tree is judged at once."""
    model = tiny.hf_model.__wrapped__("llama", torch.float32)
    first = aquiline.load(model, None, packed=False).generate([1, 2], max_new_tokens=1).token_ids[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[first] = math.nan
    broken = aquiline.load(model, "prompt-lookup", packed=False)
    bias = {first: 200.0} if settings else {}
    with pytest.raises(ValueError, match="NaN"):
        broken.generate([1, 2], max_new_tokens=4, logit_bias=bias, **settings)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda ids, scores: None, "NoneType; allowed: scores of shape"),
        (lambda ids, scores: scores[0], rf"\({VOCABULARY},\)"),
        (lambda ids, scores: scores[:, :5], r"\(1, 5\)"),
    ],
)
def test_processors_that_return_something_else(returned: Any, words: str) -> None:
    params = SamplingParams(max_new_tokens=1, logits_processors=(returned,))
    with pytest.raises(TypeError, match=words):
        generate_requests(path_engine(False), [Request([3], params)])


# -- ends inside an accepted path --------------------------------------------------------------


@pytest.mark.parametrize("drafts", ["greedy", "penalty", "sampled"])
@pytest.mark.parametrize("end", ["eos", "stop_token_ids", "stop", "budget"])
def test_nothing_after_an_end_is_counted(end: str, drafts: str) -> None:
    """A drafter that knows the text drafts past its end: τ is what was emitted per forward."""
    extra = {"greedy": {}, "penalty": {"presence_penalty": 0.1}, "sampled": {"temperature": 1.0, "seed": 3}}[drafts]
    prompt = [3, 4]
    (whole,) = outputs(path_engine(False), SamplingParams(max_new_tokens=16, **extra), [prompt])
    last = next(t for i, t in enumerate(whole.token_ids[4:8]) if t not in whole.token_ids[: 4 + i])
    settings: dict[str, Any] = {
        "eos": {},
        "stop_token_ids": {"stop_token_ids": (last,)},
        "stop": {"stop": (byte_level().decode([last]),)},
        "budget": {"max_new_tokens": whole.token_ids.index(last) + 1},
    }[end]
    made = replace(path_engine(False), end_ids=(last,) if end == "eos" else ())
    params = SamplingParams(**({"max_new_tokens": 16} | extra | settings))
    (plain,) = outputs(made, params, [prompt])
    known = known_from([[*prompt, *whole.token_ids]])
    for depth in (1, 2, 12):
        drafter = KnowingDrafter(known, VOCABULARY, depth=depth, error=0)
        (found,) = outputs(replace(made, drafter=drafter), params, [prompt])
        stats = found.stats
        assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)
        assert stats.mean_accept_length == (stats.emitted - 1) / stats.steps
        assert stats.acceptance_rate == [1.0] * len(stats.acceptance_rate), "the token that ends is not a rejection"


# -- errors of one request ---------------------------------------------------------------------


class _Raises:
    """Raises once the output has `count` tokens."""

    def __init__(self, count: int, prompt_length: int) -> None:
        self.length = prompt_length + count

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise KeyError("mine")
        return scores


@BOTH
@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_request_that_fails_leaves_the_others_alone(speculative: bool, count: int) -> None:
    prompts = [[3, 4], [5, 6, 7], [8]]
    expected = outputs(path_engine(False), SamplingParams(max_new_tokens=9), prompts)
    made = path_engine(speculative)
    requests = [Request(prompt, SamplingParams(max_new_tokens=9, logprobs=0)) for prompt in prompts]
    failing = replace(requests[1].params, logits_processors=(_Raises(count, 3),))
    found = generate_requests(made, [requests[0], replace(requests[1], params=failing), requests[2]])
    assert [o.token_ids for o in found] == [
        expected[0].token_ids,
        expected[1].token_ids[:count],
        expected[2].token_ids,
    ]
    assert [o.finish_reason for o in found] == ["length", "error", "length"]
    assert isinstance(found[1].error, KeyError) and found[1].logprobs is not None and len(found[1].logprobs) == count
    with pytest.raises(KeyError, match="mine"):
        generate_requests(made, [replace(requests[1], params=failing)])
    assert [o.token_ids for o in generate_requests(made, requests)] == [o.token_ids for o in expected]


@BOTH
def test_a_processor_never_sees_tokens_after_an_end(speculative: bool) -> None:
    (whole,) = outputs(path_engine(False), SamplingParams(max_new_tokens=12), [[3, 4]])
    end = whole.token_ids[5]
    count = whole.token_ids.index(end) + 1
    params = SamplingParams(max_new_tokens=12, logits_processors=(_Raises(count, 2),))
    made = replace(path_engine(speculative), end_ids=(end,))
    (found,) = outputs(made, params, [[3, 4]])
    assert (found.token_ids, found.finish_reason, found.error) == (whole.token_ids[:count], "eos", None)


# -- stop strings that are special tokens -----------------------------------------------------


@BOTH
def test_a_special_token_as_a_stop_string_ends_the_output(speculative: bool) -> None:
    from aquiline.engine.request import special_tokens

    made = path_engine(speculative)
    (text, token), *_ = special_tokens(made.tokenizer).items()
    params = SamplingParams(max_new_tokens=12, stop=(text, "zzzz"), logit_bias={token: 8.0})
    (found,) = outputs(made, params, [[3, 4]])
    assert found.token_ids[-1] == token and token not in found.token_ids[:-1]
    assert (found.finish_reason, found.text) == ("stop", made.tokenizer.decode(found.token_ids[:-1]))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=rf"stop_token_ids=\({token},\)"):
        outputs(made, replace(params, stop=(f"a{text}",)), [[3, 4]])


def test_a_forked_process_is_refused_with_the_remedy() -> None:
    import os

    made = path_engine(False)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outputs(made, SamplingParams(max_new_tokens=2), [[3, 4]])
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    said = os.read(read, 4096).decode()
    os.close(read)
    assert "forked" in said and "spawn" in said and str(os.getpid()) in said
