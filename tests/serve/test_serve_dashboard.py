"""Does somebody who opens the dashboard in a browser see what the server does? In a real headless Chromium, where there is one."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
ANSWER_S = 60.0


class Browser:
    """Chromium, told what to do over its DevTools protocol: JSON through pipes 3 and 4, each message ended by a zero."""

    def __init__(self, executable: str, profile: Path) -> None:
        theirs, self._to = os.pipe()
        self._from, answers = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs, answers)]
        script = f'exec "$@" 3<&{high[0]} 4>&{high[1]} 2>/dev/null'
        command = ["bash", "-c", script, "bash", executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=high, stdout=subprocess.DEVNULL)
        for fd in (theirs, answers, *high):
            os.close(fd)
        self._read = b""
        self._last = 0
        self._session: str | None = None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last:
            continue
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._from], [], [], ANSWER_S)[0], "the browser does not answer"
            piece = os.read(self._from, 65536)
            assert piece, "the browser has gone"
            self._read += piece
        message, self._read = self._read.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def text(self, element: str) -> str:
        """What a user reads there; table cells are separated by tabs."""
        expression = f"document.getElementById({element!r})?.innerText ?? ''"
        return str(self.call("Runtime.evaluate", expression=expression)["result"]["value"])

    def body_class(self) -> str:
        return str(self.call("Runtime.evaluate", expression="document.body.className")["result"]["value"])

    def screenshot(self, width: int = 1280, height: int = 1330) -> bytes:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def close(self) -> None:
        os.close(self._to)  # Chromium ends with the pipe
        try:
            self._process.wait(ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._from)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    browser = Browser(CHROMIUM, tmp_path / "profile")
    yield browser
    browser.close()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium; or name one: CHROMIUM=PATH)")
def test_a_user_sees_queue_batch_memory_and_latencies(
    browser: Browser, puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server()
    browser.open(f"{server.url}/dashboard")

    def shows(**wanted: str) -> None:
        until(lambda: {name: browser.text(name) for name in wanted} == wanted, f"the page shows {wanted}")

    shows(state="ready", running="0", waiting="0", kv="0 %", ended="0")
    until(lambda: len(server.service.history.since(0)["rows"]) > 0, "the history begins")
    server.strings.hold()
    classes = ["chat"] * 4 + ["batch"] * 2
    threads = [
        threading.Thread(target=server.post, kwargs={"prompt": [number] * 40, "max_tokens": 8, "slo_class": name})
        for number, name in enumerate(classes, start=1)
    ]
    for thread in threads:
        thread.start()
    until(lambda: server.service.session.controller.num_alive == 6, "all have come")
    server.strings.step()  # one prompt, or several: those that had arrived by then
    until(lambda: browser.text("running") == "4", "as many as fit run")
    shows(waiting="2", running="4")
    assert browser.text("batch-prompt-tokens") not in ("", "0")
    assert float(browser.text("kv").removesuffix(" %")) == pytest.approx(100 * 12 / 64, abs=0.1)
    server.strings.step(2)
    until(lambda: float(browser.text("batch-decodes")) > 1, "the batch is decodes")
    assert "4 of 4" in browser.text("replicas")
    assert "vllm_v1" in browser.text("sets")
    server.strings.let_go()
    for thread in threads:
        thread.join(60)
    shows(running="0", waiting="0", kv="0 %", ended="6")
    rows = [line.split("\t") for line in browser.text("classes").splitlines()[1:]]
    assert {row[0]: row[1] for row in rows} == {"chat": "4", "batch": "2"}
    assert all(float(cell.replace(",", "")) > 0 for row in rows for cell in row[2:])
    browser.open(f"{server.url}/dashboard")  # clients that connect later also get the earlier values
    shows(state="ready", ended="6")
    browser.call("Runtime.evaluate", expression="document.querySelector('#ranges button').click()")
    times = re.compile(r"(\d\d:\d\d:\d\d\s*){4}")
    until(lambda: times.fullmatch(browser.text("axis-queue")), "the history is drawn")
    server.strings.breaks = True
    assert server.post().status_code == 503
    until(lambda: browser.text("state") == "not serving", "the page says that nothing serves")
    assert browser.body_class() == "bad"
    assert "no replica is up" in browser.text("detail")
    assert "the puppet is broken" in browser.text("events")
    until(lambda: browser.text("errors") == "1", "the refused request is counted")
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder, "dashboard-bad.png").write_bytes(browser.screenshot())


def test_a_browser_asks_its_user_for_the_key(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(api_key="sesame-9")
    unasked = httpx.get(f"{server.url}/dashboard")
    assert unasked.status_code == 401
    assert unasked.headers["www-authenticate"] == 'Basic realm="vajra"'
    for path in ("/dashboard", "/dashboard/data"):
        assert httpx.get(server.url + path, auth=("anyone", "sesame-9")).status_code == 200
        assert httpx.get(server.url + path, auth=("anyone", "sesame")).status_code == 401
    assert httpx.get(f"{server.url}/v1/models", auth=("anyone", "sesame-9")).status_code == 401
