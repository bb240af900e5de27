"""A headless Chromium, told by Chrome's DevTools protocol over two pipes; no package is needed for it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

SCREENS = Path(__file__).resolve().parent.parent / "build" / "screens"
"""Where pictures of pages are kept."""

# What is asked of a page once it has been loaded: its links, its pictures without content, and what is wider than the page.
# What can be scrolled by itself is no wider, nor is what has no width, since it is hidden.
_SEEN = """(async () => {
  await document.fonts.ready;
  const width = WIDTH;
  const scrolls = (element) => {
    for (let each = element; each && each !== document.body; each = each.parentElement) {
      const style = getComputedStyle(each);
      if (style.overflowX !== "visible" || style.position === "fixed") return true;
    }
    return false;
  };
  const text = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), wide = [];
  while (text.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(text.currentNode);
    const box = range.getBoundingClientRect();
    if (box.right > width + 1 && box.width && !scrolls(text.currentNode.parentElement))
      wide.push(text.currentNode.data.trim().slice(0, 60));
  }
  return {
    title: document.title,
    height: document.documentElement.scrollHeight,
    links: [...document.querySelectorAll("a[href]")].map((a) => a.href),
    ids: [...document.querySelectorAll("[id], a[name]")].map((each) => each.id || each.name),
    empty: [...document.images].filter((image) => !image.complete || !image.naturalWidth).map((image) => image.src.slice(0, 99)),
    wide: wide.filter((each) => each),
    overflow: Math.max(0, document.documentElement.scrollWidth - width),
  };
})()"""

_ON_ITS_PIPES = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'  # it reads 3 and writes 4


@dataclass
class Seen:
    """A page, loaded and laid out."""

    title: str
    height: int  # pixels
    links: list[str]
    ids: list[str]
    errors: list[str]  # on the console, and files that did not come
    empty: list[str]  # pictures that show nothing
    wide: list[str]  # texts that reach beyond the page's right edge
    overflow: int  # pixels by which the page is wider than the window

    @property
    def faults(self) -> dict[str, Any]:
        found = {
            "errors": self.errors,
            "empty pictures": self.empty,
            "too wide": self.wide,
            "scrolls by": self.overflow,
        }
        return {name: value for name, value in found.items() if value}


class Browser:
    """Chromium with one page. Skips the test where there is none."""

    def __init__(self) -> None:
        found = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
        program = next((path for name in found if name and (path := shutil.which(name))), None)
        if program is None:
            pytest.skip("needs Chromium to look at pages (apt install chromium, or CHROMIUM=its path)")
        self._folder = tempfile.mkdtemp(prefix="browser-")
        self._process = subprocess.Popen(
            [
                *("sh", "-c", _ON_ITS_PIPES, program),
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
                *("--disable-background-networking", "--disable-extensions", "--no-first-run", "--no-proxy-server"),
                *("--remote-debugging-pipe", f"--user-data-dir={self._folder}", "about:blank"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout.fileno()
        self._numbers, self._buffer, self._events, self._session = itertools.count(1), b"", [], None
        page = next(each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._commands.close()  # it ends then
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            read = os.read(self._answers, 1 << 20)
            if not read:
                raise ConnectionError(f"Chromium has ended with status {self._process.wait()}")
            self._buffer += read
        first, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(first)

    def _call(self, method: str, seconds: float = 30, **parameters: Any) -> dict[str, Any]:
        number, deadline = next(self._numbers), time.monotonic() + seconds
        sent = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            sent["sessionId"] = self._session
        self._commands.write(json.dumps(sent).encode() + b"\0")
        self._commands.flush()
        while (message := self._message(deadline)).get("id") != number:
            self._events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def look(self, url: str, width: int, picture: str | None = None) -> Seen:
        """Opens a page in a window of so many pixels; leaves its picture in ``build/screens`` under a name."""
        # Phones lay out pages that do not know of them for 980 pixels.
        size = {"width": width, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", height=900, **size)
        self._events.clear()
        self._call("Page.navigate", url=url)
        deadline = time.monotonic() + 30
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message(deadline))
        asked = {"expression": _SEEN.replace("WIDTH", str(width)), "awaitPromise": True, "returnByValue": True}
        value = self._call("Runtime.evaluate", **asked)["result"]["value"]
        seen = Seen(errors=[*filter(None, map(_error, self._events))], **value)
        if picture is not None:
            self._call("Emulation.setDeviceMetricsOverride", height=min(seen.height, 12_000), **size)
            found = self._call("Page.captureScreenshot", format="png")["data"]
            SCREENS.mkdir(parents=True, exist_ok=True)
            (SCREENS / f"{picture}.png").write_bytes(base64.b64decode(found))
        return seen


def _error(event: dict[str, Any]) -> str | None:
    """Returns what an event says of an error; None if it is of none."""
    kind, said = event.get("method"), event.get("params", {})
    if kind == "Runtime.exceptionThrown":
        return str(said["exceptionDetails"].get("exception", said["exceptionDetails"]).get("description", said))
    if kind == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
        return " ".join(str(each.get("value", each.get("description"))) for each in said["args"])
    if kind == "Log.entryAdded" and said["entry"]["level"] == "error":
        return f"{said['entry']['text']} {said['entry'].get('url', '')}"
    if kind == "Network.loadingFailed" and not said.get("canceled"):
        return f"{said['errorText']} ({said['type']})"
    return None
