"""A small driver of headless Chromium, for tests of pages: it speaks the DevTools protocol over a web socket."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


class Tab:
    """One page in the browser. errors : messages of errors on its console, and of uncaught exceptions"""

    def __init__(self, socket: ClientConnection, session: str) -> None:
        self.socket, self.session, self.count = socket, session, 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result. Errors of the page that arrive meanwhile are kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters, "sessionId": self.session}
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv(timeout=120))
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            event, content = answer.get("method"), answer.get("params", {})
            if event == "Runtime.exceptionThrown":
                self.errors.append(content["exceptionDetails"]["exception"].get("description", "an exception"))
            elif event == "Log.entryAdded" and content["entry"]["level"] == "error":
                self.errors.append(content["entry"]["text"])

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page, and return its value; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, file: Path) -> None:
        """Open a file, and wait until the page is loaded."""
        self.call("Page.navigate", url=file.absolute().as_uri())
        ready = "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"
        self.run(ready)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser() -> Iterator[Tab]:
    """Start Chromium, and yield an empty tab. Skips the test if there is no Chromium."""
    program = next((match for name in PROGRAMS if (match := shutil.which(name))), None)
    if program is None:
        pytest.skip("there is no Chromium on this machine, so the page was not opened in a browser")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *SWITCHES, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            lines = iter(process.stderr.readline, "")
            address = next(match[0] for line in lines if (match := re.search(r"ws://\S+", line)))
            with connect(address, max_size=None) as socket:
                yield Tab(socket, _attached(socket))
        finally:
            process.kill()
            process.wait()


def _attached(socket: ClientConnection) -> str:
    """Attach to a new tab, and return the session's name."""

    def call(number: int, method: str, **parameters: Any) -> dict[str, Any]:
        socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(socket.recv(timeout=60))
            if answer.get("id") == number:
                return answer["result"]

    target = call(-1, "Target.createTarget", url="about:blank")["targetId"]
    return str(call(-2, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
