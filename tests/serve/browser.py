"""Debian's chromium without a window, driven over its pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")


class Page:
    """One tab, by chromium's own protocol: JSON messages that end with a zero byte."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._number, self._buffer, self._session = 0, b"", ""
        self.console: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        kind, params = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif kind == "Runtime.consoleAPICalled":
            self.console.append(str(params["args"]))
        elif kind == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        return message

    def run(self, code: str) -> Any:
        """Evaluates JavaScript."""
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str) -> None:
        """Loads a page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def until(self, code: str, seconds: float = 60.0) -> None:
        """Waits until JavaScript finds something true."""
        end = time.monotonic() + seconds
        while not self.run(code):
            assert time.monotonic() < end, (code, self.run("document.body.innerText"))
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, text: str = "") -> None:
        """Presses and releases a key."""
        codes = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)

    def size(self, width: int, height: int) -> None:
        """Gives the window a size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, dark: bool) -> None:
        """Says what the system prefers."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, file: Path) -> None:
        """Writes a PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with a profile of its own."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    # The protocol's pipe is file descriptors 3 and 4.
    shell = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
    words = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    words += [f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--mute-audio"]
    words += ["--disable-background-networking"]
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *words],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_in, ours_out)
    finally:
        os.close(ours_out)
        process.terminate()
        process.wait(20)
        os.close(ours_in)
