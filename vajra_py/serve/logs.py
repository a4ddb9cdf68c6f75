"""Log lines of a server: time and level on each, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Literal, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
FIELDS = "fields"
"""Under this name a record has facts that JSON lines show apart; its message shows them too."""
_PACKAGES = ("vajra_py", "vajra_policies", "vajra_kernels")


class TextFormatter(logging.Formatter):
    """`2026-11-22T14:03:07.125Z INFO vajra_py.serve.server: message`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`. A message stays on one line, whatever a client has put into it."""
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{_time(record)} {record.levelname} {record.name}: {message}{trace}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, perhaps `exception`, and the record's facts."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        row = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps({**row, **getattr(record, FIELDS, {})}, ensure_ascii=False, default=str)


class StandardError(logging.Handler):
    """Writes to what standard error is at the time; a line that cannot be written is lost, and nothing else."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        with suppress(OSError, ValueError):  # a closed pipe, a full disk
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def _time(record: logging.LogRecord) -> str:
    when = datetime.fromtimestamp(record.created, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def logging_to_stderr(log_format: LogFormat, level: LogLevel) -> Iterator[None]:
    """Within it, log lines go to standard error: this program's from `level` on, those of libraries from warnings on."""
    handler = StandardError()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    levels: dict[logging.Logger, int | str] = {
        root: logging.WARNING,
        **{logging.getLogger(name): level.upper() for name in _PACKAGES},
    }
    before = {logger: logger.level for logger in levels}
    root.addHandler(handler)
    for logger, its in levels.items():
        logger.setLevel(its)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for logger, its in before.items():
            logger.setLevel(its)
