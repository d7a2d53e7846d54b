"""The page in a real browser: a conversation, its keys, and a server that goes away and returns."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Request
from aquiline.engine.text import encode_prompt
from aquiline.sampling import SamplingParams
from tests.serve.browser import CHROMIUM, Page, browser
from tests.serve.serving import path_model, serving, user

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium (apt-get install chromium)")

ANSWERS = "[...document.querySelectorAll('.assistant')].map(turn => turn.lastElementChild.textContent)"
IDLE = "document.body.dataset.busy === 'false' && document.body.dataset.state === 'ready'"


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('say').focus()")
    page.type(text)
    page.press("Enter", "\r")


def test_the_page_names_no_other_host_and_fetches_nothing() -> None:
    source = files("aquiline.serve").joinpath("page.html").read_text(encoding="utf-8")
    assert not re.findall(r"(?:https?:)?//[a-z]", source.replace("// ", ""))
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?!data:)", source)


@needs_chromium
def test_a_conversation(tmp_path: Path) -> None:
    model = path_model(delay=0.003)
    with serving(model) as running, browser(tmp_path) as page:
        page.size(1100, 800)
        page.open(running.url)
        page.until(IDLE)
        assert page.run("document.getElementById('about').textContent") == "tiny · drafting: knowing"
        page.run("document.getElementById('most').value = 40")
        ask(page, "Hello")
        page.until(f"{ANSWERS}.length === 1 && {IDLE}")
        (output,) = generate_requests(
            model.plain().engine,
            [Request(encode_prompt(model.tokenizer, user("Hello")), SamplingParams(max_new_tokens=40))],
        )
        assert page.run(ANSWERS) == [output.text]
        sources = page.run("[...new Set([...document.querySelectorAll('.token')].map(each => each.className))]")
        assert set(sources) == {"token head", "token target"}
        title = page.run("document.querySelector('.token').title")
        assert re.fullmatch(r"(?:target's own|head), step \d+, probability \d\.\d{3}", title)
        assert float(page.run("document.getElementById('tau').textContent")) > 1.3
        assert page.run("document.getElementById('tokens').textContent") == str(len(output.token_ids))
        page.until("document.getElementById('gain').textContent.endsWith('×')")
        assert page.run("document.querySelectorAll('.bar').length") >= 2

        page.run("document.querySelector('.assistant').focus()")  # the keyboard reaches each token
        page.press("ArrowRight")
        page.press("ArrowRight")
        assert re.search(r"step \d+, probability", page.run("document.getElementById('detail').textContent"))

        page.run("document.getElementById('draft').click(); document.getElementById('again').click()")
        page.until(f"{IDLE} && document.getElementById('tau').textContent === '1.00'")
        assert page.run(ANSWERS)[0] == output.text, "the same answer without drafts"
        assert page.run("document.querySelectorAll('.token.head').length") == 0
        page.run("document.getElementById('clear').click()")
        assert page.run(f"{ANSWERS}.length") == 0 and page.run("document.getElementById('tau').textContent") == "–"
        assert page.console == []
        assert {url.split("/")[2] for url in page.requested if url.startswith("http")} == {f"127.0.0.1:{running.port}"}


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_narrow_and_wide_light_and_dark(dark: bool, tmp_path: Path) -> None:
    with serving(path_model()) as running, browser(tmp_path) as page:
        page.dark(dark)
        for width in (360, 1200):
            page.size(width, 800)
            page.open(running.url)
            page.until(IDLE)
            page.run("document.getElementById('about').textContent = 'a long name '.repeat(30)")
            ask(page, "a_word_without_a_space" * 20)
            page.until(f"{ANSWERS}.length === 1")
            assert page.run("document.documentElement.scrollWidth") <= width, "nothing hangs over"
            assert not page.run("document.getElementById('locked').getBoundingClientRect().width")
            top, side = page.run(
                "['main', 'aside'].map(name => document.querySelector(name).getBoundingClientRect())"
                ".map(box => [box.left, box.top])"
            )
            assert (side[1] > top[1]) == (width == 360), "the panel comes below on a narrow screen"
            back = page.run("getComputedStyle(document.body).backgroundColor")
            assert back == ("rgb(22, 22, 21)" if dark else "rgb(255, 255, 255)")
        page.run("document.getElementById('theme').click()")
        assert page.run("getComputedStyle(document.body).backgroundColor") != back


@needs_chromium
def test_stop_in_mid_answer(tmp_path: Path) -> None:
    model = path_model(rows=1, delay=0.02)
    with serving(model) as running, browser(tmp_path) as page:
        page.open(running.url)
        page.until(IDLE)
        page.run("document.getElementById('most').value = 900")
        ask(page, "A long one")
        page.until("Number(document.getElementById('tokens').textContent) > 5")
        page.press("Escape")
        page.until(IDLE)
        running.until(lambda: running.scheduler.running == 0)
        said = page.run(ANSWERS)[0]
        assert said and page.run("document.getElementById('error').textContent") == ""
        page.run("document.getElementById('most').value = 3")
        ask(page, "And now?")
        page.until(f"{ANSWERS}.length === 2 && {IDLE}")
        assert page.run("turns.map(turn => turn.role)") == ["user", "assistant"] * 2
        assert page.run("turns[1].content") == said


@needs_chromium
def test_a_server_that_goes_away_and_returns(tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        with serving(path_model(delay=0.02)) as running:
            page.open(running.url)
            page.until(IDLE)
            page.run("document.getElementById('most').value = 900")
            ask(page, "A long one")
            page.until("Number(document.getElementById('tokens').textContent) > 3")
            port = running.port
        page.until("document.getElementById('error').textContent.includes('away')")
        page.until("document.getElementById('again').disabled && document.body.dataset.state === 'away'")
        with serving(path_model(), port=port) as running:
            page.until(IDLE)
            assert page.run("document.getElementById('error').textContent") == ""
            page.run("document.getElementById('most').value = 12; document.getElementById('again').click()")
            page.until(f"{IDLE} && document.getElementById('tokens').textContent === '12'")
            assert page.run(f"{ANSWERS}.length") == 1


@needs_chromium
def test_a_key_is_asked_for(tmp_path: Path) -> None:
    with serving(path_model(), api_key="secret") as running, browser(tmp_path) as page:
        page.open(running.url)
        page.until("!document.getElementById('locked').hidden")
        assert "API key" in page.run("document.getElementById('about').textContent")
        page.type("secret")
        page.press("Enter", "\r")
        page.until(IDLE)
