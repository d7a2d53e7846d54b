"""Photographs the server's page: a conversation with a running server, in Debian's chromium without a window.

    aquiline serve --port 8000 &
    python -m benchmarks.page_screenshot --url http://127.0.0.1:8000 docs/page.png

`--dark` and `--width` show the page's other forms.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.serve.browser import browser
from tests.serve.test_page import IDLE, ask

TURNS = (
    "Write a Python function that adds up the even numbers of a list.",
    "Print the function again.",
)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1100, help="of the window in pixels (default: 1100)")
    parser.add_argument("--height", type=int, default=760, help="of the window in pixels (default: 760)")
    parser.add_argument("--turns", nargs="+", default=TURNS, help="what the user says")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as page:
        page.dark(options.dark)
        page.size(options.width, options.height)
        page.open(options.url)
        page.until(IDLE)
        for turn in options.turns:
            ask(page, turn)
            page.until("document.body.dataset.busy === 'true'")
            page.until(IDLE, 300)
        page.screenshot(options.picture)


if __name__ == "__main__":
    main()
