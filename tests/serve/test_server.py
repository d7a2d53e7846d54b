"""The endpoints, as unmodified clients see them."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import subprocess
from typing import Any

import openai
import pytest

from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Request
from aquiline.engine.text import encode_prompt
from aquiline.loading import Loaded
from aquiline.sampling import SamplingParams
from aquiline.serve.server import Companion
from tests.serve.serving import MODEL, Running, path_model, serving, user
from tests.tiny_tokenizers import every_byte
from tests.training.chat_templates import TOOLS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


LETTERS = dict.fromkeys(every_byte()("abcdefghijklmnopqrstuvwxyz ")["input_ids"], 100.0)
"""A bias under which every token is a character of its own."""

BIAS = {str(token): bias for token, bias in LETTERS.items()}


def expected(model: Loaded, prompt: Any, **settings: Any) -> list[Any]:
    """Generates without drafts, one output after the other."""
    tokens = encode_prompt(model.tokenizer, prompt, raw=True)
    return generate_requests(model.plain().engine, [Request(tokens, SamplingParams(**settings))])


# -- the openai package, unmodified, every answer parsed strictly into its types -----------------


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.8}])
def test_a_chat_equals_generate(client: openai.OpenAI, model: Loaded, settings: dict[str, Any]) -> None:
    (output,) = expected(model, user("Hello"), max_new_tokens=40, **settings)
    whole = client.chat.completions.create(model=MODEL, messages=user("Hello"), max_tokens=40, **settings)
    assert whole.choices[0].message.content == output.text and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == {"eos": "stop", "length": "length"}[output.finish_reason]
    assert whole.usage is not None and whole.usage.completion_tokens == len(output.token_ids)
    assert whole.usage.prompt_tokens == len(output.prompt_tokens)


def test_a_stream_has_one_id_one_role_and_an_empty_last_delta(client: openai.OpenAI, model: Loaded) -> None:
    (output,) = expected(model, user("Stream"), max_new_tokens=30)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=user("Stream"),
            max_completion_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert [delta.delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.delta.content or "" for delta in deltas) == output.text
    assert [delta.finish_reason for delta in deltas] == [*[None] * (len(deltas) - 1), "length"]
    assert deltas[-1].delta.content is None, "the reason comes in a chunk of its own"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 30
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completions_with_several_prompts_and_outputs(client: openai.OpenAI, model: Loaded) -> None:
    prompts = ["one", "another one"]
    found = client.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=9, temperature=0.8, seed=3, extra_body={"min_p": 0.01}
    )
    settings = {"n": 2, "max_new_tokens": 9, "temperature": 0.8, "seed": 3, "min_p": 0.01}
    wanted = [output for prompt in prompts for output in expected(model, prompt, **settings)]
    assert [choice.text for choice in found.choices] == [output.text for output in wanted]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage is not None and found.usage.completion_tokens == sum(len(o.token_ids) for o in wanted)
    (alone,) = client.completions.create(model=MODEL, prompt=[5, 6, 7], temperature=0).choices
    assert alone.text == expected(model, [5, 6, 7], max_new_tokens=16)[0].text, "16 tokens, as OpenAI's default has it"


def test_stop_strings_and_end_tokens(client: openai.OpenAI, model: Loaded) -> None:
    (output,) = expected(model, "abc", max_new_tokens=40)
    stop = output.text[10:12]
    (choice,) = client.completions.create(model=MODEL, prompt="abc", max_tokens=40, temperature=0, stop=stop).choices
    assert choice.text == output.text[: output.text.index(stop)] and choice.finish_reason == "stop"
    biased = client.completions.create(model=MODEL, prompt="abc", logit_bias={"0": 100}, temperature=0)
    assert biased.choices[0].text == "" and biased.choices[0].finish_reason == "stop"


def test_stop_strings_across_the_events_of_a_stream(server: Running, model: Loaded) -> None:
    (output,) = expected(model, "abc", max_new_tokens=40, logit_bias=LETTERS)
    body = {"prompt": "abc", "max_tokens": 40, "temperature": 0, "logit_bias": BIAS}
    pieces = [event["choices"][0]["text"] for event in server.events(TEXT, body)[:-1]]
    assert "".join(pieces) == output.text
    begins = len("".join(pieces[:3])) - 1  # the last character of one event, and the first two of the next ones
    stop = output.text[begins : begins + 3]
    *events, last, _ = server.events(TEXT, body | {"stop": ["never", stop]})
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == output.text[: output.text.index(stop)] and last["choices"][0]["finish_reason"] == "stop"


def test_log_probabilities(client: openai.OpenAI, model: Loaded) -> None:
    (output,) = expected(model, user("p"), max_new_tokens=12, logprobs=3)
    for stream in (False, True):
        answer = client.chat.completions.create(
            model=MODEL, messages=user("p"), max_tokens=12, logprobs=True, top_logprobs=3, temperature=0, stream=stream
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        tokens = [each for choice in choices if choice.logprobs for each in choice.logprobs.content or []]
        assert [each.logprob for each in tokens] == pytest.approx(output.logprobs, abs=1e-6)
        best = [[other.logprob for other in each.top_logprobs] for each in tokens]
        assert best == [pytest.approx(list(each.values()), abs=1e-6) for each in output.top_logprobs]


def test_echo_scores_the_prompt_itself(server: Running, model: Loaded) -> None:
    """lm-eval's form: each token of the prompt with its probability after those before it."""
    prompt = encode_prompt(model.tokenizer, "a long prompt " * 12, raw=True)
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 2, "temperature": 0}
    _, _, answer = server.ask(TEXT, body)
    (choice,) = answer["choices"]
    scores = [
        float(model.target.logits(prompt[:i]).float().log_softmax(-1)[prompt[i]])  # type: ignore[attr-defined]
        for i in range(1, len(prompt))
    ]
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None and len(found["token_logprobs"]) == len(prompt) + 1
    assert found["token_logprobs"][1:-1] == pytest.approx(scores, abs=1e-5)
    assert choice["text"] == "a long prompt " * 12 + expected(model, prompt, max_new_tokens=1)[0].text
    assert found["text_offset"][:3] == [0, 1, 2] and found["top_logprobs"][0] is None
    best = zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True)
    assert all(text in alternatives for text, alternatives in best)
    streamed = [event["choices"][0] for event in server.events(TEXT, body)[:-1]]
    assert "".join(each["text"] for each in streamed) == choice["text"]
    (plain,) = server.ask(TEXT, {"prompt": "ab", "max_tokens": 0, "echo": True})[2]["choices"]
    assert plain["text"] == "ab" and plain["finish_reason"] == "length"


def test_json_schemas_through_the_grammar(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL, messages=user("well?"), response_format=form, max_tokens=300, temperature=0
    )
    assert json.loads(answer.choices[0].message.content or "") in ({"ok": True}, {"ok": False})


def test_a_prediction_is_counted_and_changes_nothing(client: openai.OpenAI, model: Loaded) -> None:
    (output,) = expected(model, user("code"), max_new_tokens=60, logit_bias=LETTERS)
    edited = output.text[:25] + "zz" + output.text[30:]
    found = client.chat.completions.create(
        model=MODEL,
        messages=user("code"),
        max_tokens=60,
        temperature=0,
        logit_bias=BIAS,  # type: ignore[arg-type]
        prediction={"type": "content", "content": edited},
        extra_body={"provenance": True},
    )
    assert found.choices[0].message.content == output.text
    assert found.usage is not None and found.usage.completion_tokens_details is not None
    details = found.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens or 0) > 10 and (details.rejected_prediction_tokens or 0) > 0
    pieces: Any = found.choices[0].model_extra["provenance"]  # type: ignore[index]
    accepted = sum(len(piece["token_ids"]) for piece in pieces if piece["source"] == "prediction")
    assert accepted == details.accepted_prediction_tokens


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL and client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.chat.completions.create(model="other", messages=user("x"))


def test_the_async_client_with_many_requests(server: Running, model: Loaded) -> None:
    import asyncio

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        answer = await client.chat.completions.create(
            model=MODEL, messages=user(f"question {i}"), max_tokens=10 + i, temperature=0.7, seed=i
        )
        return answer.choices[0].message.content or ""

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, i) for i in range(12)))

    wanted = [expected(model, user(f"question {i}"), max_new_tokens=10 + i, temperature=0.7, seed=i) for i in range(12)]
    assert asyncio.run(all_of_them()) == [output.text for (output,) in wanted]


def test_tools_and_variables_go_through_the_template(model: Loaded) -> None:
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = "{{ mood }}" + TOOLS
    knowing = dataclasses.replace(model, engine=dataclasses.replace(model.engine, tokenizer=tokenizer))
    add: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    said: Any = [
        *user("2 + 3?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "five"},
    ]
    call = {"name": "add", "arguments": {"a": 2}}
    begin, end = "<|im_start|>", "<|im_end|>\n"
    text = f"glad{begin}tools\n{json.dumps([add])}{end}{begin}user\n2 + 3?{end}"
    text += f"{begin}assistant\n<call>{json.dumps(call)}{end}{begin}tool\nfive{end}{begin}assistant\n"
    with serving(knowing) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        more: Any = {"max_tokens": 30, "temperature": 0, "extra_body": {KWARGS: {"mood": "glad"}}}
        answer = client.chat.completions.create(model=MODEL, messages=said, tools=[add], tool_choice="auto", **more)
        (output,) = expected(knowing, text, max_new_tokens=30)
        assert answer.choices[0].message.content == output.text and answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.prompt_tokens == len(output.prompt_tokens)
        silent = client.chat.completions.create(
            model=MODEL,
            messages=user("x"),
            tools=[add],
            tool_choice="none",
            **more,  # type: ignore[arg-type]
        )
        (output,) = expected(knowing, f"glad{begin}user\nx{end}{begin}assistant\n", max_new_tokens=30)
        assert silent.choices[0].message.content == output.text


# -- our own extensions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wish", [{"draft": "none"}, {"draft": "auto", "tree": {"depth": 1}}, {"tree": {"depth": 3, "nodes": 2}}]
)
def test_speculation_per_request_changes_no_output(server: Running, model: Loaded, wish: dict[str, Any]) -> None:
    (output,) = expected(model, "speculate", max_new_tokens=40, temperature=0.6, seed=8)
    body = {"prompt": "speculate", "max_tokens": 40, "temperature": 0.6, "seed": 8, "provenance": True}
    _, _, found = server.ask(TEXT, body | {"speculation": wish})
    assert found["choices"][0]["text"] == output.text
    steps = [piece["step"] for piece in found["choices"][0]["provenance"] for _ in piece["token_ids"]]
    most = max(steps.count(step) for step in steps)
    assert most == (1 if wish.get("draft") == "none" else 2 if wish["tree"]["depth"] == 1 else most)
    assert most <= 1 + wish.get("tree", {}).get("nodes", 4)
    sources = {piece["source"] for piece in found["choices"][0]["provenance"]}
    assert sources == ({"target"} if wish.get("draft") == "none" else {"target", "head"})


@pytest.mark.parametrize("letters", [True, False])
def test_provenance_covers_text_and_tokens(server: Running, model: Loaded, letters: bool) -> None:
    """Every token is a piece; without the bias most are parts of characters."""
    (output,) = expected(model, "origin", max_new_tokens=50, **({"logit_bias": LETTERS} if letters else {}))
    stop = output.text[20:23]
    body = {"prompt": "origin", "max_tokens": 50, "temperature": 0, "provenance": True, "stop": [stop]}
    body |= {"logit_bias": BIAS} if letters else {}
    _, _, whole = server.ask(TEXT, body)
    pieces = whole["choices"][0]["provenance"]
    text = output.text[: output.text.index(stop)]
    assert "".join(piece["text"] for piece in pieces) == text == whole["choices"][0]["text"]
    tokens = [token for piece in pieces for token in piece["token_ids"]]
    assert tokens == output.token_ids[: len(tokens)] and len(tokens) == whole["usage"]["completion_tokens"]
    streamed = server.events(TEXT, body)
    chunks = [chunk["choices"][0].get("provenance", []) for chunk in streamed[:-1]]
    assert [piece for chunk in chunks for piece in chunk] == pieces
    steps = [piece["step"] for piece in pieces]
    assert steps == sorted(steps) and {piece["source"] for piece in pieces} == {"head", "target"}
    if letters:
        assert [(piece["text"], len(piece["token_ids"])) for piece in pieces[:20]] == [(c, 1) for c in text]


# -- what is refused, and how --------------------------------------------------------------------

KWARGS = "chat_template_kwargs"
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}

REFUSED: dict[str, tuple[str, Any, str]] = {
    "unknown": (CHAT, {"messages": user("x"), "frobnicate": 1}, "frobnicate"),
    "tool without a function": (
        CHAT,
        {"messages": user("x"), "tools": [{"type": "function"}]},
        "tools[0].function",
    ),
    "tools": (CHAT, {"messages": user("x"), "tools": [{"type": "function", "function": {"name": "add"}}]}, "tools"),
    "template": (CHAT, {"messages": user("x"), "chat_template_kwargs": {"enable_thinking": False}}, KWARGS),
    "template's messages": (CHAT, {"messages": user("x"), "chat_template_kwargs": {"messages": []}}, KWARGS),
    "functions": (CHAT, {"messages": user("x"), "functions": [{"name": "add"}]}, "functions"),
    "tool choice": (CHAT, {"messages": user("x"), "tool_choice": "required"}, "tool_choice"),
    "calls": (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "messages"),
    "call's arguments": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "a user's call": (
        CHAT,
        {"messages": [*user("x"), user("x")[0] | {"tool_calls": [CALL]}]},
        "messages[1].tool_calls",
    ),
    "no messages": (CHAT, {}, "messages"),
    "empty messages": (CHAT, {"messages": []}, "messages"),
    "role": (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "extra in message": (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    "image": (CHAT, {"messages": user([{"type": "image_url"}])}, "messages[0].content[0].type"),  # type: ignore[arg-type]
    "temperature": (CHAT, {"messages": user("x"), "temperature": 3}, "temperature"),
    "temperature text": (CHAT, {"messages": user("x"), "temperature": "1"}, "temperature"),
    "boolean number": (CHAT, {"messages": user("x"), "max_tokens": True}, "max_tokens"),
    "two limits": (CHAT, {"messages": user("x"), "max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    "n": (TEXT, {"prompt": "x", "n": 0}, "n"),
    "outputs": (TEXT, {"prompt": ["x", "y"], "n": 128}, "n"),
    "no prompts": (TEXT, {"prompt": []}, "prompt"),
    "one empty prompt": (TEXT, {"prompt": ["x", ""]}, "prompt"),
    "empty token ids": (TEXT, {"prompt": [[]]}, "prompt"),
    "top_p": (TEXT, {"prompt": "x", "top_p": 0}, "top_p"),
    "suffix": (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
    "best_of": (TEXT, {"prompt": "x", "best_of": 3}, "best_of"),
    "stop": (TEXT, {"prompt": "x", "stop": [""]}, "stop"),
    "bias": (TEXT, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    "bias size": (TEXT, {"prompt": "x", "logit_bias": {"3": 101}}, "logit_bias.3"),
    "top_logprobs": (CHAT, {"messages": user("x"), "top_logprobs": 2}, "top_logprobs"),
    "stream_options": (CHAT, {"messages": user("x"), "stream_options": {}}, "stream_options"),
    "format": (CHAT, {"messages": user("x"), "response_format": {"type": "xml"}}, "response_format.type"),
    "schema": (
        CHAT,
        {"messages": user("x"), "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    "speculation": (TEXT, {"prompt": "x", "speculation": {"draft": "maybe"}}, "speculation.draft"),
    "speculation tree": (TEXT, {"prompt": "x", "speculation": {"tree": {"depth": 0}}}, "speculation.tree.depth"),
    "store": (TEXT, {"prompt": "x", "store": True}, "store"),
    "empty prompt": (TEXT, {"prompt": ""}, "prompt"),
    "mixed prompt": (TEXT, {"prompt": ["x", 1]}, "prompt"),
    "surrogate": (TEXT, {"prompt": "\ud800"}, "prompt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_field(server: Running, name: str) -> None:
    path, body, param = REFUSED[name]
    status, _, answer = server.ask(path, body)
    assert status == 400 and answer["error"]["param"] == param and param.split(".")[-1] in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'{"prompt": NaN}', b'{"prompt": 1e999}', b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_json_objects(server: Running, raw: bytes) -> None:
    assert server.ask(TEXT, raw)[0] == 400


def test_too_long_says_the_numbers(server: Running) -> None:
    status, _, answer = server.ask(TEXT, {"prompt": "x" * 1100})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert "1100" in answer["error"]["message"] and "1024" in answer["error"]["message"]


def test_paths_and_methods(server: Running) -> None:
    assert server.ask("/v2/nothing")[0] == 404
    status, _, answer = server.ask(CHAT, method="GET")
    assert status == 405 and "POST" in answer["error"]["message"]


def test_tokenize_and_back(server: Running) -> None:
    _, _, found = server.ask("/tokenize", {"prompt": "Grüße"})
    assert found["count"] == len(found["tokens"]) == 7 and found["max_model_len"] == 1024
    assert server.ask("/detokenize", {"tokens": found["tokens"]})[2] == {"prompt": "Grüße"}
    assert server.ask("/detokenize", {"tokens": [9999]})[0] == 400


# -- curl ----------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_reads_the_stream(server: Running, model: Loaded) -> None:
    body = json.dumps({"messages": user("curl"), "max_tokens": 20, "temperature": 0, "stream": True})
    command = ["curl", "-sN", "--max-time", "60", f"{server.url}{CHAT}", "--json", body]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert lines[-2:] == ["data: [DONE]", ""] and text == expected(model, user("curl"), max_new_tokens=20)[0].text


def test_a_companion_receives_outputs_whose_requests_allow_it() -> None:
    kept: list[list[int]] = []
    ended: list[bool] = []
    companion = Companion(
        lambda output: kept.append(output.token_ids), lambda: {"version": 3}, lambda: ended.append(True)
    )
    with serving(path_model(), accompany=lambda loaded, busy: companion) as running:
        body = {"prompt": "keep this", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        assert running.ask("/v1/completions", body | {"store": False})[0] == 200 and kept == []
        assert running.ask("/v1/completions", body)[0] == 200
        running.until(lambda: [len(tokens) for tokens in kept] == [5])
        assert running.ask("/health")[2]["renewal"] == {"version": 3}
    assert ended == [True]
