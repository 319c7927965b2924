"""A real browser for a test: headless Chromium, driven over its debugging pipe; nothing to install but Chromium."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
READS, WRITES = 3, 4  # the file descriptors that Chromium expects


def chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `problems`: what its console and its exceptions say; `fetched`: what it asked the network for."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.problems: list[str] = []
        self.fetched: list[str] = []
        self._timeout, self._number, self._session, self._events = timeout, 0, "", []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to_browser = os.pipe()
        self._from_browser, to_write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write)]

        def place() -> None:
            os.dup2(ends[0], READS)
            os.dup2(ends[1], WRITES)

        program = chromium()
        assert program is not None
        command = [program, *FLAGS, f"--user-data-dir={self._folder.name}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, preexec_fn=place, pass_fds=(READS, WRITES, *ends), **quiet)
        for end in (to_read, to_write, *ends):
            os.close(end)
        self._buffer = b""
        os.set_blocking(self._from_browser, False)

    def open(self, file: Path) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=file.absolute().as_uri())
        self._await(lambda message: message.get("method") == "Page.loadEventFired")

    def run(self, script: str, awaited: bool = False) -> Any:
        """The value of a JavaScript expression on the page; `awaited`: of the promise that it gives."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=awaited)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        answer = self._await(lambda found: found.get("id") == number)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _await(self, wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            for index, message in enumerate(self._events):
                if wanted(message):
                    return dict(self._events.pop(index))
            with suppress(BlockingIOError):
                self._buffer += os.read(self._from_browser, 1 << 20)
            *whole, self._buffer = self._buffer.split(b"\0")
            for text in whole:
                message = json.loads(text)
                self._events.append(message)
                self._notice(message)
            if not whole:
                time.sleep(0.01)
        raise TimeoutError("the browser does not answer")

    def _notice(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning"):
                self.problems.append(str(parameters["args"]))
            case "Network.requestWillBeSent" if not parameters["request"]["url"].startswith(("file:", "data:")):
                self.fetched.append(parameters["request"]["url"])
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(parameters["entry"]))

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(timeout=20)
        os.close(self._to_browser)
        os.close(self._from_browser)
        self._folder.cleanup()
