"""Chromium without a window, driven over the DevTools protocol through two pipes: no driver, no
library, no port.

Commands and events are JSON, each ended by a zero byte. Knows pages and keys, nothing of ours.
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.few_colours import small_png
from support.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LOOK_S = 0.05
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
PIXELS = """async (png) => {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const bytes = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const parts = [];
  for (let at = 0; at < bytes.length; at += 32768) parts.push(String.fromCharCode(...bytes.subarray(at, at + 32768)));
  return { width: canvas.width, height: canvas.height, data: btoa(parts.join("")) };
}"""  # noqa: E501
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38}


def find_chromium() -> str | None:
    """The browser that is installed here, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. `messages`: what it wrote to its console, threw, or was refused, in order."""

    def __init__(self, browser: "Browser", session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context
        self.messages: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return what DevTools answers to a command."""
        return self._browser.call(method, parameters, self._session)

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", {"browserContextId": self._context})

    def open(
        self,
        url: str,
        *,
        width: int = 1200,
        height: int = 900,
        dark: bool = False,
        still: bool = False,
    ) -> None:
        """Go there, in a window of that size, for somebody who likes it dark, or with little
        motion."""
        self.resize(width, height)
        wishes = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": name, "value": value} for name, value in wishes.items()],
        )
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def reload(self) -> None:
        """The page anew, and nothing of the one before."""
        self.value("window.before = true")
        self.call("Page.reload")
        self.until("!window.before && document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def value(self, expression: str) -> Any:
        """The value of an expression in the page; what it throws is raised."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait until an expression is true of the page; its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, (
                f"{expression} never came true; the page said {self.messages}"
            )
            time.sleep(LOOK_S)
        return value

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        said: str = self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return said

    def press(self, key: str) -> None:
        """A key, as somebody presses it."""
        code = KEYS[key]
        more = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(more if kind == "keyDown" else {}),
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page; `whole`: beyond the window too."""
        path.write_bytes(base64.b64decode(self._captured(whole)))

    def small_picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture in few colours, as small as one of the documentation has to be."""
        taken = self._captured(whole)
        other = self._browser.page()  # the page itself may forbid what is needed to read a picture
        path.write_bytes(small_png(other.pixels(taken)))
        other.close()

    def pixels(self, png: str) -> NDArray[np.uint8]:
        """Return the pixels of a PNG in base64 (rows, columns, 3)."""
        told = self.value(f"({PIXELS})({json.dumps(png)})")
        shown = np.frombuffer(base64.b64decode(told["data"]), np.uint8)
        return shown.reshape(told["height"], told["width"], 4)[:, :, :3]

    def _captured(self, whole: bool) -> str:
        data: str = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)[
            "data"
        ]
        return data

    def hear(self, method: str, parameters: Mapping[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.messages.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.messages.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.messages.append(
                f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}"
            )
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


class Browser:
    """A running Chromium."""

    def __init__(self, process: "subprocess.Popen[bytes]", to: int, of: int) -> None:
        self._process, self._to, self._of = process, to, of
        self._number = 0
        self._unread = b""
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        """A new tab, that knows nothing of the others."""
        context = self.call("Target.createBrowserContext", {})["browserContextId"]
        target = self.call(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})[
            "sessionId"
        ]
        self._pages[session] = page = Page(self, session, context)
        return page

    def call(self, method: str, parameters: Mapping[str, Any], session: str = "") -> dict[str, Any]:
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": parameters,
            **({"sessionId": session} if session else {}),
        }
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._to, content) :]
        while (answer := self._read()).get("id") != self._number:
            if (
                page := self._pages.get(answer.get("sessionId", ""))
            ) is not None and "method" in answer:
                page.hear(answer["method"], answer["params"])
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._of, 1 << 20)
            assert more, "the browser has ended"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """A browser with a profile of its own, which goes with it."""
    with tempfile.TemporaryDirectory(prefix="dt-chromium-", ignore_cleanup_errors=True) as folder:
        hears, to = os.pipe()
        of, says = os.pipe()
        inherited = [
            fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (hears, says)
        ]  # above those that they become
        for descriptor in (hears, says):
            os.close(descriptor)
        flags = [
            *FLAGS,
            f"--user-data-dir={folder}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        plumbing = 'hears=$1 says=$2; shift 2; exec "$@" 3<&"$hears" 4>&"$says"'
        command = [
            "bash",
            "-c",
            plumbing,
            "bash",
            *map(str, inherited),
            program,
            *flags,
            "about:blank",
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=inherited,
            start_new_session=True,
        )
        for descriptor in inherited:
            os.close(descriptor)
        browser = Browser(process, to, of)
        try:
            yield browser
            browser.call("Browser.close", {})
        finally:
            os.close(to)
            os.close(of)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
