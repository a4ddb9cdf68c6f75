"""`vajra serve` in a process of its own, and waiting for its conditions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

STARTUP_S = 240.0
"""Start-up limit, for loading torch and transformers on a busy machine."""
SOON_S = 60.0


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = SOON_S) -> None:
    """Poll a condition at growing intervals, and fail on timeout."""
    start = time.monotonic()
    pause = threading.Event()
    while not holds():
        waited = time.monotonic() - start
        assert waited < timeout_s, f"waited {timeout_s:.0f} s in vain: {what}"
        pause.wait(min(max(0.005, waited / 20), 0.5))  # polling takes CPU time from the process under test


@dataclass
class ServerProcess:
    """Process of the command `vajra serve`."""

    process: subprocess.Popen[str]
    url: str
    log: list[str]
    reader: threading.Thread

    def terminate(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(SOON_S)
        self.reader.join(SOON_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


def start_server(*arguments: str, reads_log: bool = True, **variables: str) -> ServerProcess:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", "from vajra_py.cli.main import main; main()", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    log: list[str] = []
    assert process.stderr is not None
    stderr = process.stderr
    url = ""
    for line in stderr:
        log.append(line)
        if "listening on " in line:
            url = line.split("listening on ")[1].split()[0]
            break
    assert url, "".join(log)
    reader = threading.Thread(target=lambda: log.extend(stderr), daemon=True)
    if reads_log:
        reader.start()
    return ServerProcess(process, url, log, reader)
