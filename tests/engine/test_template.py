"""Chat templates render as transformers renders them, drop nothing, and cannot run away."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from aquiline.engine.template import apply_template
from aquiline.engine.text import encode_prompt
from tests.tiny_tokenizers import every_byte
from tests.training.chat_templates import FAMILIES, OPENS_THOUGHT, QWEN3_FIELDS, TOOLS

TALK = [
    {"role": "user", "content": "Hé"},
    {"role": "assistant", "content": "<think>\nx\n</think>\n\ny"},
    {"role": "user", "content": " b\n"},
]
TEMPLATES = {name: family[0] for name, family in FAMILIES.items()}
TEMPLATES |= {"fields": QWEN3_FIELDS, "opens": OPENS_THOUGHT, "tools": TOOLS}


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_rendering_is_that_of_transformers(name: str, prompt: bool) -> None:
    tokenizer, template = every_byte(), TEMPLATES[name]
    expected = tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False, add_generation_prompt=prompt)
    assert apply_template(tokenizer, TALK, template=template, prompt=prompt) == expected


PARTS = """\
{%- for turn in messages -%}<turn>{{ turn.role }}: {% for part in turn.content -%}
  {{ part.text }}{%- endfor %}<eos>{%- endfor -%}"""
TEXTS = "{%- for turn in messages -%}<turn>{{ turn.role }}: {{ turn.content }}<eos>{%- endfor -%}"


@pytest.mark.parametrize("template", [PARTS, TEXTS])
@pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_a_template_gets_the_form_of_content_that_it_reads(template: str, content: Any) -> None:
    messages = [{"role": "user", "content": content}]
    assert apply_template(every_byte(), messages, template=template) == "<turn>user: ab<eos>"


def test_a_dropped_message_is_named() -> None:
    template = "{%- for turn in messages -%}<turn>{{ turn.role }}{%- endfor -%}"
    with pytest.raises(ValueError, match=r"drops the content of message 2 \(user\)"):
        apply_template(every_byte(), [{"role": "system", "content": ""}, TALK[0]], template=template)


def test_changed_contents_are_not_dropped_ones() -> None:
    template = "{% for turn in messages %}{{ turn.content | upper | tojson }}{% endfor %}"
    assert apply_template(every_byte(), TALK[:1], template=template) == '"HÉ"'


def add(a: int) -> int:
    """A tool as transformers would take it."""
    return a


@pytest.mark.parametrize("what", ["x", 5, {"function": 5}, {"name": 5}, {}, add])
def test_tools_and_calls_without_a_name(what: Any) -> None:
    for messages, tools in (([{**TALK[1], "tool_calls": [what]}], ()), (TALK, [what])):
        with pytest.raises(TypeError, match=r"is not a tool or a call of one; allowed: .*'name'"):
            apply_template(every_byte(), messages, template=TOOLS, tools=tools)


def test_a_call_that_the_template_drops_is_named() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '"add"' in apply_template(every_byte(), messages, template=TOOLS)
    with pytest.raises(ValueError, match=r"does not print the call of 'add'"):
        apply_template(every_byte(), messages, template=TEMPLATES["chatml"])


def test_settings_and_tools_reach_the_template() -> None:
    tokenizer = every_byte()
    off = apply_template(tokenizer, TALK[:1], template=QWEN3_FIELDS, settings={"enable_thinking": False})
    assert off.endswith("assistant\n<think>\n\n</think>\n\n")
    tool = {"type": "function", "function": {"name": "add"}}
    assert json.dumps(tool) in apply_template(tokenizer, TALK[:1], template=TOOLS, tools=[tool])
    for settings in ({"no_such": 1}, {"messages": []}, {"tokenize": True}):
        with pytest.raises(ValueError, match=f"no setting '{next(iter(settings))}'"):
            apply_template(tokenizer, TALK, template=QWEN3_FIELDS + "{# messages tokenize #}", settings=settings)
    with pytest.raises(ValueError, match="does not use tools"):
        apply_template(tokenizer, TALK, template=TEXTS, tools=[tool])
    with pytest.raises(ValueError, match="need messages, or a text without raw"):
        encode_prompt(tokenizer, "a", raw=True, chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError.*raw=True"),
        ("{{ none | length }}", "NoneType.*check their roles"),
        ("{{ messages[7].content.x.y }}", "rejects the messages"),
        ("{% for %}", "rejects the messages"),
        ("{{ raise_exception('no system') }}", "rejects the messages: no system"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_is_named(template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        apply_template(every_byte(), TALK, template=template)


def doubling(step: str) -> str:
    return "{% set ns = namespace(x='abcdefgh') %}{% for i in range(99) %}" + step + "{% endfor %}{{ ns.x }}"


def nested(items: str) -> str:
    return f"{{% for a in {items} %}}" * 3 + "{% endfor %}" * 3


BOMBS = {
    "loops": nested("range(99999)"),
    "loops over a generator": nested("range(99999) | select"),
    "loops over text": nested("'x' * 9999"),
    "lists": "{% for a in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    "macros": "{% macro a() %}{% endmacro %}"
    + "".join(
        f"{{% macro a{i}() %}}{{{{ a{i - 1 if i else ''}() }}}}{{{{ a{i - 1 if i else ''}() }}}}{{% endmacro %}}"
        for i in range(40)
    )
    + "{{ a39() }}",
    "a power of constants": "{{ (10**10)**(10**10) }}",
    "a power of variables": "{% set x = 10**10 %}{{ x**x }}",
    "repetition": "{{ 'x' * 10**9 }}",
    "a wide filter": "{{ 'x' | center(10**10) }}",
    "a wide method": "{{ 'x'.ljust(10**10) }}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "another wide format": "{{ '{:>999999999}'.format(1) }}",
    "much text": "{% for a in range(9999) %}" + "x" * 9999 + "{% endfor %}",
    "doubling by ~": doubling("{% set ns.x = ns.x ~ ns.x %}"),
    "doubling by +": doubling("{% set ns.x = ns.x + ns.x %}"),
    "doubling by a block": doubling("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "doubling by join": doubling("{% set ns.x = [ns.x, ns.x] | join %}"),
    "doubling by replace": doubling("{% set ns.x = ns.x | replace('a', 'aa') | replace('b', 'ab') %}"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_rendering_is_bounded(case: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"it takes more than [0-9,]+ .*use another template"):
        apply_template(every_byte(), TALK, template=BOMBS[case])
    assert time.monotonic() - started < 60  # seconds on a busy machine, of hours without a bound


def test_a_long_conversation_is_within_the_bound() -> None:
    talk = [{"role": role, "content": "word " * 400} for _ in range(1000) for role in ("user", "assistant")]
    text = apply_template(every_byte(), talk, template=QWEN3_FIELDS)
    assert text.count("word ") == 2000 * 400
