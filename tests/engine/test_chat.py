"""A chat answers as a fresh prefill of the whole conversation would, and computes only what is new."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.trees import DynamicTree
from aquiline.engine.chat import ChatSession
from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Engine, Request
from aquiline.engine.text import encode_prompt
from aquiline.sampling import SamplingParams
from aquiline.targets.decoder import Decoder
from tests import tiny
from tests.knowing_drafter import KnowingDrafter
from tests.path_target import PathTarget, fingerprint
from tests.tiny_tokenizers import every_byte
from tests.training.chat_templates import FAMILIES

SAYS = ("Hi, who are you?", "And the capital of France?", "Thanks 😀 — good bye!")
ANSWERS = ("<think>\nA name.\n</think>\n\n I am nobody.", " Paris,  of course \n", "<think>\n\n</think>\n\nBye")
"""Answers that the target is made to give: thoughts that templates drop, white space that they strip."""


def tokenizer_for(family: str) -> Any:
    """A tokenizer with a family's template, whose special tokens are tokens."""
    template, special, _, _ = FAMILIES[family]
    tokenizer = copy.deepcopy(every_byte())
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


class Forced:
    """A processor that makes the target say `answer` and then end."""

    def __init__(self, tokenizer: Any, answer: str) -> None:
        self.script = [*tokenizer(answer, add_special_tokens=False)["input_ids"], 0]
        self.start: int | None = None

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.start = ids.shape[1] if self.start is None else self.start
        done = ids.shape[1] - self.start
        forced = torch.full_like(scores, -torch.inf)
        forced[0, self.script[min(done, len(self.script) - 1)]] = 0
        return forced


def forced(tokenizer: Any, answer: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=100, logprobs=0, logits_processors=(Forced(tokenizer, answer),))


def path_engine(tokenizer: Any, drafter: str) -> Engine:
    target = PathTarget(len(tokenizer), 2000, variety=97)

    def known(prefix: Sequence[int]) -> list[int]:
        text = next(  # the answer that the text so far ends in the middle of
            (s for s in scripts for n in range(len(s), -1, -1) if n and list(prefix[-n:]) == s[:n]), scripts[0]
        )
        done = max((n for n in range(len(text)) if n and list(prefix[-n:]) == text[:n]), default=0)
        return text[done : done + 5]

    def check(text: Sequence[int], feature: Tensor) -> None:
        assert int(feature) == fingerprint(text)

    scripts = [Forced(tokenizer, answer).script for answer in ANSWERS]
    made: dict[str, Drafter | None] = {
        "plain": None,
        "knowing": KnowingDrafter(known, len(tokenizer), features=(0,), check=check),
        "lookup": PromptLookup(min_ngram=1),
    }
    return Engine(target, made[drafter], tokenizer, (0,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafter", ["plain", "knowing", "lookup"])
def test_every_template_as_a_fresh_prefill(family: str, drafter: str) -> None:
    tokenizer = tokenizer_for(family)
    engine = path_engine(tokenizer, drafter)
    session = ChatSession(engine)
    reused = 0
    for say, answer in zip(SAYS, ANSWERS, strict=True):
        asked = [*session.messages, {"role": "user", "content": say}]
        engine.target.widths.clear()  # type: ignore[attr-defined]
        output = session.send(say, forced(tokenizer, answer))
        computed = engine.target.widths[0][1]  # type: ignore[attr-defined]
        assert output.prompt_tokens == encode_prompt(engine.tokenizer, asked)
        (fresh,) = generate_requests(engine, [Request(output.prompt_tokens, forced(tokenizer, answer))])
        assert (output.token_ids, output.text, output.logprobs) == (fresh.token_ids, fresh.text, fresh.logprobs)
        assert output.text == answer and output.finish_reason == "eos"
        assert session.messages == [*asked, {"role": "assistant", "content": answer}]
        reused += len(output.prompt_tokens) - computed
    assert reused > 60, "the turns before are not computed again"


def test_dropped_thoughts_are_computed_again() -> None:
    """Qwen3's template drops the first answer's thoughts in the second turn."""
    tokenizer = tokenizer_for("qwen3")
    engine = path_engine(tokenizer, "knowing")
    session = ChatSession(engine)
    session.send(SAYS[0], forced(tokenizer, ANSWERS[0]))
    output = session.send(SAYS[1], forced(tokenizer, ANSWERS[1]))
    assert "think" not in tokenizer.decode(output.prompt_tokens)
    assert output.text == ANSWERS[1]


# -- with a network: the caches themselves are those of a fresh prefill ---------------------------


def network_engine(tokenizer: Any) -> Engine:
    """A tiny target and head for the bytes of `tokenizer`."""
    size = len(tokenizer)
    torch.manual_seed(3)
    base = tiny.decoder("llama").config
    rope = replace(base.layer.rope)
    target = Decoder(replace(base, vocab_size=size, max_positions=1024, layer=replace(base.layer, rope=rope)))
    target = target.double().eval().requires_grad_(False)
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3)
    head = tiny.head("eagle3", vocab_size=size, draft_vocab_size=tiny.VOCAB)
    return Engine(target, EagleDrafter(head, target, DynamicTree(8, 3, 3)), tokenizer, (0,))


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama2"])
def test_the_caches_are_those_of_a_fresh_prefill(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_for(family)
    engine = network_engine(tokenizer)
    caches = recorded(monkeypatch, engine.target, "new_cache")
    states = recorded(monkeypatch, engine.drafter, "new_state")
    session = ChatSession(engine)
    params = SamplingParams(max_new_tokens=12, temperature=0.8, seed=2)
    for turn, say in enumerate(("Hi", "And?")):
        session.send(say, forced(tokenizer, ANSWERS[0][:14])) if turn == 0 else session.send(say, params)
    fresh = ChatSession(engine, messages=session.messages[:-2])
    output = fresh.send("And?", params)
    assert output.text == session.messages[-1]["content"]
    blocks = [
        (cache.key_block, cache.value_block, state.cache.key_block[..., :-1, :])
        for cache, state in zip(caches, states, strict=True)
    ]
    for mine, other in zip(*blocks, strict=True):
        size = len(output.prompt_tokens)
        torch.testing.assert_close(mine[:, :, :, :size], other[:, :, :, :size], rtol=1e-9, atol=1e-9)


def recorded(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """What a method returns from now on."""
    method, made = getattr(owner, name), list[Any]()

    def record(*arguments: Any) -> Any:
        made.append(method(*arguments))
        return made[-1]

    monkeypatch.setattr(owner, name, record)
    return made


# -- turns that end early --------------------------------------------------------------------------


def chat(**settings: Any) -> ChatSession:
    return ChatSession(path_engine(tokenizer_for("chatml"), "knowing"), **settings)


def test_an_answer_that_is_closed_stays_as_far_as_it_was_shown() -> None:
    session = chat()
    stream = session.stream("Hi", forced(session.engine.tokenizer, "one two three"))
    shown = next(stream).text + next(stream).text
    stream.close()  # type: ignore[attr-defined]
    assert session.messages[1:] == [{"role": "assistant", "content": shown}]
    assert session.send("More", forced(session.engine.tokenizer, "ok")).text == "ok"


def test_a_turn_without_any_text_is_withdrawn() -> None:
    session = chat()
    stream = session.stream("Hi")
    stream.close()  # type: ignore[attr-defined]
    assert session.messages == []


def test_an_interrupt_leaves_the_session_usable() -> None:
    session = chat()
    session.send("Hi", forced(session.engine.tokenizer, "hello"))
    target = session.engine.target
    forward, calls = target.forward, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return forward(*args)

    target.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.send("More", forced(session.engine.tokenizer, "one two"))
    # The first token had been shown when the interrupt came.
    assert session.messages[2:] == [{"role": "user", "content": "More"}, {"role": "assistant", "content": "o"}]
    output = session.send("Again", forced(session.engine.tokenizer, "yes"))
    (fresh,) = generate_requests(
        session.engine, [Request(output.prompt_tokens, forced(session.engine.tokenizer, "yes"))]
    )
    assert output.logprobs == fresh.logprobs


def test_two_answers_at_once_are_refused() -> None:
    session = chat()
    first, second = session.stream("a"), session.stream("b")
    next(first)
    for refused in (lambda: next(second), lambda: session.stream("c")):
        with pytest.raises(RuntimeError, match="still being streamed"):
            refused()
    first.close()  # type: ignore[attr-defined]
    assert session.send("d", forced(session.engine.tokenizer, "ok")).text == "ok"


def test_close_and_go_on() -> None:
    session = chat()
    session.send("Hi", forced(session.engine.tokenizer, "hello"))
    session.close()
    assert session.send("More", forced(session.engine.tokenizer, "ok")).text == "ok"


def test_a_conversation_that_no_longer_fits_is_refused_and_unchanged() -> None:
    session = chat()
    before: Callable[[], list[Any]] = lambda: list(session.messages)  # noqa: E731
    kept = before()
    with pytest.raises(ValueError, match="no room"):
        session.stream("x" * 3000)
    assert before() == kept


def test_system_prompt_history_and_defaults() -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    session = chat(system="Be brief.", messages=history, defaults=SamplingParams(max_new_tokens=3, ignore_eos=True))
    output = session.send("c")
    text = session.engine.tokenizer.decode(output.prompt_tokens)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>")
    assert len(output.token_ids) == 3
    assert len(session.send("d", max_new_tokens=2).token_ids) == 2
    assert session.send("e", max_new_tokens=0).text == ""
    assert [m["role"] for m in session.messages[-2:]] == ["user", "assistant"]


def test_a_chat_rejects_bad_input() -> None:
    with pytest.raises(ValueError, match="chat template"):
        ChatSession(replace(chat().engine, tokenizer=None))
    with pytest.raises(ValueError, match="n is 2"):
        chat(defaults=SamplingParams(n=2))
    session = ChatSession(path_engine(tokenizer_for("gemma"), "plain"), system="Be brief.")
    with pytest.raises(ValueError, match="System role not supported"):
        session.stream("Hi")
    session = chat()
    for refused, words in (
        (lambda: ChatSession(session.engine, system=5), "system is 5; allowed: a text or None"),  # type: ignore[arg-type]
        (lambda: session.send(5), "the message is 5; allowed: a text"),  # type: ignore[arg-type]
        (lambda: session.send("x", max_tokens=5), "'max_tokens'; allowed: max_new_tokens"),
        (lambda: session.send("x", 5), "params is 5; allowed: SamplingParams"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=words):
            refused()
