"""Serves a target without a network on a free port until it is ended: cheap enough for thousands of requests."""

from __future__ import annotations

import threading

from tests.serve.serving import MODEL, path_model, serving


def main() -> None:
    """Prints the ready line of `aquiline serve`."""
    with serving(path_model(context=256), timeout=20) as running:
        print(f"ready: {running.url} (model {MODEL})", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
