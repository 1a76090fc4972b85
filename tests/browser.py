"""A headless Chromium for the tests, driven over its own pipe (the DevTools protocol): no driver, no library."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}


def chromium() -> str | None:
    """The program; None where it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. `problems` collects what its console and its network complained about.

    Raises TimeoutError with the page's text when something takes longer than `deadline_s`.
    """

    def __init__(self, program: str, profile: Path, deadline_s: float = 60.0) -> None:
        self.deadline_s = deadline_s
        self.problems: list[str] = []
        self._numbers = itertools.count(1)
        self._data = b""
        self._inbox: list[dict[str, Any]] = []
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (commands, answers)]
        flags = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
        flags += ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        script = f'exec "$@" 3<&{high[0]} 4>&{high[1]}'  # the browser listens on 3 and answers on 4
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *flags],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (commands, answers, *high):
            os.close(fd)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the browser, and end all of its processes if it does not."""
        try:
            self._send("Browser.close", {}, "")
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        os.close(self._write)
        os.close(self._read)

    # --- what a visitor does -----------------------------------------------------------------------------------

    def goto(self, url: str) -> None:
        """Open an address, anew; what the last page still asks for is no longer noted."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """ "dark" or "light", as the visitor's system has it."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def press(self, key: str) -> None:
        """A key down and up."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = KEYS.get(key, ord(key[0].upper()))
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            name = "Space" if key == " " else key
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=name, windowsVirtualKeyCode=code, **more)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """A real click in the middle of an element."""
        x, y = self.middle(selector)
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where an element's middle is in the window."""
        found = self.value(
            f"(() => {{ const n = document.querySelector({json.dumps(selector)});"
            " n.scrollIntoView({block: 'center'}); const b = n.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return found[0], found[1]

    # --- what a visitor sees -----------------------------------------------------------------------------------

    def value(self, expression: str) -> Any:
        """A JavaScript expression's value; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def text(self) -> str:
        """All that can be read."""
        return self.value("document.body.innerText")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + self.deadline_s
        while time.monotonic() < end:
            found = self.value(f"new Promise(r => setTimeout(() => r((() => {expression})() ?? null), 50))")
            if found:
                return found
        raise TimeoutError(f"never true: {expression}; the page says: {self.text()[:2000]}; problems: {self.problems}")

    def screenshot(self, path: Path) -> None:
        """The window, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    # --- the protocol ------------------------------------------------------------------------------------------

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to the page, and its answer."""
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        number = self._send(method, parameters, session)
        end = time.monotonic() + self.deadline_s
        while True:
            message = self._receive(end - time.monotonic(), method)
            if message.get("id") == number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _send(self, method: str, parameters: dict[str, Any], session: str) -> int:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        data = json.dumps({**message, "sessionId": session} if session else message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        return number

    def _receive(self, left: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._read], [], [], max(0.0, left))
            if not ready:
                raise TimeoutError(f"the browser did not answer {what}")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise AssertionError(f"the browser ended, code {self._process.wait(10)}, at {what}")
            self._data += chunk
        raw, _, self._data = self._data.partition(b"\0")
        return json.loads(raw)

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what the page complained about."""
        method, found = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details.get("text"))))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")
