"""Every number of a report, computed again from the raw records by other code; the HTML's structure."""

import html
import html.parser
import json
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aquiline.bench.agreement import complaint
from aquiline.bench.metrics import DEFINITIONS
from aquiline.bench.page import render_html
from aquiline.bench.report import render_markdown
from aquiline.bench.runner import run_bench
from aquiline.bench.settings import BenchSettings
from aquiline.bench.tasks import TITLES
from tests.bench.scripted import path_bed

Results = dict[str, Any]


@pytest.fixture(scope="module", name="results")
def _results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A small run, its noise-free times replaced by known ones, with confidences for the calibration."""
    from aquiline.bench.records import record_from_json
    from aquiline.bench.report import compile_results
    from aquiline.bench.tasks import Question

    folder = tmp_path_factory.mktemp("report")
    lines = [{"question_id": i, "turns": ["the cat the", "abc"][: 1 + i % 2]} for i in range(3)]
    (folder / "mt_bench.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "mine.jsonl").write_text('{"prompt": "Which?"}\n')
    settings = BenchSettings(
        methods=("prompt-lookup:min_ngram=1",),
        try_methods=(),
        questions=(str(folder),),
        max_new_tokens=16,
        temperatures=(0.0, 1.0),
        batch_sizes=(1, 2),
        output=str(folder / "out"),
    )
    whole = run_bench(settings, path_bed(), quiet=True).results
    records = []
    for i, values in enumerate(whole["records"]):
        seconds = 1.0 + 0.37 * ((i * 7) % 11)
        share = seconds / values["seconds"]
        values |= {
            "seconds": seconds,
            "first_token_seconds": [s * share for s in values["first_token_seconds"]],
            "gaps": [[[s * share, n] for s, n in row] for row in values["gaps"]],
            "phases": {phase: s * share for phase, s in values["phases"].items()},
            "memory": {"before": 1000 + i, "peak": 5000 + 3 * i},
        }
        if values["method"] != "plain" and values["accepted"]:
            bins = [[0, 0.0, 0]] * 20
            bins[4 + i % 3] = [10, 2.5, 1]
            bins[15] = [4, 3.1, values["accepted"]]
            values["calibration"] = bins
        records.append(record_from_json(values))
    return compile_results(
        settings=whole["settings"],
        environment={k: v for k, v in whole["environment"].items() if k != "plain_spread"},
        methods=whole["methods"],
        not_run=[{"method": "medusa", "reason": "no <head>"}],
        questions=[Question(task, str(i), ("x",)) for task, n in whole["questions"].items() for i in range(n)],
        skipped=[{"task": "mine", "question": "9", "turn": 0, "prompt_tokens": 9999}],
        records=records,
        divergences=[],
        curve=whole["cost_curve"],
    )


def chosen(results: Results, cell: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        r
        for r in results["records"]
        if (r["temperature"], r["batch"], r["method"]) == (cell["temperature"], cell["batch"], cell["method"])
        and cell["task"] in (r["task"], "all", f"{r['task']}, first turns")
        and not (cell["task"].endswith("first turns") and r["turn"])
    ]


def case(record: dict[str, Any]) -> tuple[Any, ...]:
    return (record["task"], *record["questions"], record["turn"], record["temperature"], record["batch"])


def tokens(record: dict[str, Any]) -> int:
    return sum(map(len, record["outputs"]))


def test_every_number_of_the_summary_follows_from_the_records(results: Results) -> None:
    plain: dict[tuple[Any, ...], list[float]] = {}
    for record in results["records"]:
        if record["method"] == "plain":
            plain.setdefault(case(record), []).append(record["seconds"] / tokens(record))
    assert {len(pair) for pair in plain.values()} == {2}
    # Temperatures × methods × tasks with "all", batch 1 and 2, and MT-bench's first turns.
    assert len(results["summary"]) == 2 * 2 * 3 + 2 * 2 * 2 + 2 * 2
    turns = [c for c in results["summary"] if c["task"] == "mt_bench, first turns"]
    assert {(c["batch"], c["prompts"]) for c in turns} == {(1, 3)}
    for cell in results["summary"]:
        mine = chosen(results, cell)
        ratios = [statistics.mean(plain[case(r)]) / (r["seconds"] / tokens(r)) for r in mine]
        assert cell["speedup_vs_plain"]["median"] == pytest.approx(statistics.median(ratios))
        assert cell["speedup_vs_hf"] is None
        assert cell["prompts"] == len({case(r) for r in mine})
        assert cell["tokens"] == sum(map(tokens, mine))
        assert cell["seconds"] == pytest.approx(sum(r["seconds"] for r in mine))
        rates = [tokens(r) / r["seconds"] for r in mine]
        assert cell["tokens_per_second"]["median"] == pytest.approx(statistics.median(rates))
        later = [
            (tokens(r) - len(r["outputs"])) / (r["seconds"] - min(r["first_token_seconds"]))
            for r in mine
            if tokens(r) > len(r["outputs"])
        ]
        assert cell["decode_tokens_per_second"]["median"] == pytest.approx(statistics.median(later))
        steps, accepted = sum(r["steps"] for r in mine), sum(r["accepted"] for r in mine)
        assert cell["tau"]["value"] == pytest.approx(1 + accepted / steps)
        assert cell["nodes_per_step"] == pytest.approx(sum(r["nodes"] for r in mine) / steps)
        for depth, share in enumerate(cell["acceptance_by_depth"]):
            at = sum(r["accepted_at"][depth] for r in mine if depth < len(r["accepted_at"]))
            assert share == pytest.approx(at / steps)
            if cell["method"] != "plain":
                offered = sum(r["offered_at"][depth] for r in mine if depth < len(r["offered_at"]))
                assert cell["alpha"][depth] == pytest.approx(at / offered)
        latencies = sorted(s / n for r in mine for row in r["gaps"] for s, n in row for _ in range(n))
        assert cell["inter_token_seconds"]["p50"] == pytest.approx(statistics.median(latencies))
        assert latencies[0] <= cell["inter_token_seconds"]["p95"] <= latencies[-1]
        assert sum(x <= cell["inter_token_seconds"]["p95"] + 1e-12 for x in latencies) >= 0.95 * len(latencies) - 1
        firsts = [s for r in mine for s in r["first_token_seconds"]]
        assert cell["first_token_seconds"]["p50"] == pytest.approx(statistics.median(firsts))
        for phase in ("target", "prefill"):
            spent = sum(r["phases"].get(phase, 0.0) for r in mine)
            assert cell["phases"][phase] == pytest.approx(spent / cell["seconds"])
        assert sum(cell["phases"].values()) == pytest.approx(1)
        assert cell["memory"]["peak_bytes"] == max(r["memory"]["peak"] for r in mine)
        assert cell["memory"]["added_bytes"] == max(r["memory"]["peak"] - r["memory"]["before"] for r in mine)


def test_calibration_is_pooled_over_records(results: Results) -> None:
    judged = [c for c in results["summary"] if "calibration" in c]
    assert judged
    for cell in judged:
        mine = [r["calibration"] for r in chosen(results, cell) if r["calibration"]]
        for i, (count, confidence, accepted) in enumerate(cell["calibration"]):
            assert count == sum(b[i][0] for b in mine)
            assert confidence == pytest.approx(sum(b[i][1] for b in mine))
            assert accepted == sum(b[i][2] for b in mine)
        total = sum(b[0] for b in cell["calibration"])
        error = sum(b[0] / total * abs(b[1] / b[0] - b[2] / b[0]) for b in cell["calibration"] if b[0])
        assert cell["ece"] == pytest.approx(error)


def test_intervals_hold_the_median_and_widen_with_the_spread(results: Results) -> None:
    for cell in results["summary"]:
        for name in ("speedup_vs_plain", "tokens_per_second", "decode_tokens_per_second"):
            assert cell[name]["low"] <= cell[name]["median"] <= cell[name]["high"]
        assert cell["tau"]["low"] <= cell["tau"]["value"] + 1e-9 and cell["tau"]["value"] <= cell["tau"]["high"] + 1e-9
    single = next(c for c in results["summary"] if c["task"] == "mine" and c["method"] != "plain")
    assert single["speedup_vs_plain"]["low"] == single["speedup_vs_plain"]["high"]  # one question alone
    whole = next(c for c in results["summary"] if c["task"] == "all" and c["method"] != "plain")
    assert whole["speedup_vs_plain"]["low"] < whole["speedup_vs_plain"]["high"]


def test_agreement_and_spread_follow_from_the_records(results: Results) -> None:
    plain = {case(r): r for r in results["records"] if r["method"] == "plain" and r["repeat"] == 0}
    for cell in results["agreement"]:
        mine = [
            r
            for r in results["records"]
            if (r["temperature"], r["batch"]) == (cell["temperature"], cell["batch"])
            and ("plain (second run)" if r["method"] == "plain" else r["method"]) == cell["method"]
            and (r["method"], r["repeat"]) != ("plain", 0)
        ]
        rows = [(a, b) for r in mine for a, b in zip(r["outputs"], plain[case(r)]["outputs"], strict=True)]
        assert cell["outputs"] == len(rows) and cell["equal"] == sum(a == b for a, b in rows)
        assert cell["tokens"] == cell["tokens_before_divergence"] == sum(len(b) for _, b in rows)
    pairs: dict[tuple[Any, ...], list[float]] = {}
    for record in results["records"]:
        if record["method"] == "plain":
            pairs.setdefault(case(record), []).append(record["seconds"])
    spread = results["environment"]["plain_spread"]
    assert spread["pairs"] == len(pairs)
    assert spread["median"] == pytest.approx(statistics.median(max(p) / min(p) - 1 for p in pairs.values()))


def test_the_table_says_what_the_summary_says(results: Results) -> None:
    text = render_markdown(results)
    for temperature in (0.0, 1.0):
        part = text.split(f"T = {temperature:g}\n")[1].split("\nT = ")[0]
        cells = {
            (c["method"], c["task"]): c
            for c in results["summary"]
            if c["temperature"] == temperature and c["batch"] == 1
        }
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][2:]
        for row in rows[:2]:
            method = row[0]
            for shown, task in zip(row[1:3], ("mt_bench", "mine"), strict=True):
                cell = cells[method, task]
                assert shown == f"{cell['speedup_vs_plain']['median']:.2f}x / {cell['tau']['value']:.2f}"
            whole = cells[method, "all"]["tokens_per_second"]
            assert row[-1] == f"{whole['median']:.1f} ({whole['low']:.1f}–{whole['high']:.1f})"
            assert row[-2] == "–"
    assert "Not run: medusa" in text and "Skipped, longer than the context: 1 prompts" in text


class Reader(html.parser.HTMLParser):
    """Checks that tags close in order, and collects them."""

    VOID = ("meta", "link", "rect", "line", "polyline", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attrs for name, attrs in self.tags if name == tag)


def test_the_page_is_whole_and_needs_nothing_else(results: Results) -> None:
    page = render_html(results)
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    titles = [attrs["aria-label"] for attrs in reader.of("svg")]
    expected = ["Speedup by task", "Mean accept length by task", "Acceptance by depth", "Calibration"]
    assert titles == [*expected, "Speedup by batch size"] * 2 + ["Cost of the target's forward by number of tokens"]
    assert not list(reader.of("script")) and not list(reader.of("img"))
    addresses = [v for _, attrs in reader.tags for k, v in attrs.items() if k in ("href", "src")]
    assert addresses == ["data:,"]
    assert not re.search(r"url\(|@import|https?:", page)
    assert all(name in reader.text for name in DEFINITIONS)
    chain = next(c for c in results["summary"] if c.get("alpha") and c["batch"] == 1 and c["task"] == "all")
    shown = "".join(f"<td>{value:.3f}</td>" for value in chain["alpha"])
    assert f"<td>{chain['method']}</td>{shown}" in page
    assert f"<td>{chain['phases']['commit']:.1%}</td>" in page
    assert TITLES["mt_bench"] in reader.text and "no <head>" in reader.text
    assert "nan" not in page.lower().replace("finance", "")
    # Bars of two tasks and "all", for the one method that is not plain, in each temperature's two charts.
    assert len(list(reader.of("rect"))) == 3 * 2 * 2


def test_divergences_are_shown(results: Results) -> None:
    entry = {
        "method": "buggy", "task": "qa", "question": "3", "turn": 0, "batch": 1, "position": 4,
        "plain_token": 1, "method_token": 2, "gap": 0.25, "noise": 0.5, "near_tie": True,
    }  # fmt: skip
    ended = entry | {"gap": None, "near_tie": False}
    page = render_html(results | {"divergences": [entry, ended]})
    assert "gap 0.25, kernels&#x27; noise 0.5: a near-tie" in page
    assert "one output had ended: NOT a near-tie" in page
    assert "Differing outputs of our methods at T = 0: 2, near-ties: 1." in render_markdown(
        results | {"divergences": [entry, ended]}
    )
    assert complaint([], __import__("torch").float32, exact=False) is None


PROBE = """<script>
onload = () => {
  const seen = [...document.querySelectorAll("svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const inside = [...svg.querySelectorAll("rect, circle, polyline")].filter(mark => {
      const own = mark.getBoundingClientRect();
      return own.width + own.height > 0 && own.left >= box.left - 1 && own.right <= box.right + 1
        && own.top >= box.top - 1 && own.bottom <= box.bottom + 1;
    });
    return [svg.getAttribute("aria-label"), Math.round(box.width), Math.round(box.height), inside.length];
  });
  document.body.dataset.seen = JSON.stringify([seen, performance.getEntriesByType("resource").length]);
};
</script>"""
"""Appended to a copy of the page: what the browser laid out, and what it fetched."""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium (apt-get install chromium)")
def test_the_page_in_a_real_browser(results: Results, tmp_path: Path) -> None:
    """No console message, every plot laid out with its marks, nothing fetched."""
    page, probed = tmp_path / "report.html", tmp_path / "probed.html"
    page.write_text(render_html(results), encoding="utf-8")
    probed.write_text(render_html(results).replace("</body>", PROBE + "</body>"), encoding="utf-8")
    base = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    base += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,6000", "--virtual-time-budget=2000"]
    log = tmp_path / "net.json"
    command = [*base, f"--log-net-log={log}", "--enable-logging=stderr", "--v=0"]
    run = subprocess.run(
        [*command, f"--screenshot={tmp_path / 'page.png'}", page.as_uri()], capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr
    assert "CONSOLE" not in run.stderr
    assert (tmp_path / "page.png").stat().st_size > 50_000
    requests = re.findall(r'"url":"((?!file:|data:|chrome)[^"]+)"', log.read_text())
    assert not [url for url in requests if "google" not in url and "gvt1" not in url]  # the browser's own
    run = subprocess.run([*base, "--dump-dom", probed.as_uri()], capture_output=True, text=True, timeout=250)
    found = re.search(r'data-seen="([^"]*)"', run.stdout)
    assert found is not None, run.stderr
    seen, fetched = json.loads(html.unescape(found[1]))
    assert fetched == 0
    one = ["Speedup by task", "Mean accept length by task", "Acceptance by depth", "Calibration"]
    one.append("Speedup by batch size")
    assert [title for title, *_ in seen] == [*one, *one, "Cost of the target's forward by number of tokens"]
    for title, width, height, marks in seen:
        assert width > 800 and height > 250 and marks > 1, title
