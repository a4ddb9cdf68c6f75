"""Log lines of a server, each with time and level, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Literal, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
_PASS_EVERY_S = 1.0
_MOST_KINDS = 64
FIELDS = "fields"
"""Attribute of a log record for facts that JSON lines show as separate fields; the message contains them too."""
_PACKAGES = ("vajra_py", "vajra_policies", "vajra_kernels")


_MOST_CHARACTERS = 4000
"""Maximum number of characters of a message; text from clients is truncated to far less."""


def escaped(text: str) -> str:
    """Return the text with unprintable characters escaped, so that it stays on one line and cannot move the cursor."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def cut(text: str, most: int = 200) -> str:
    """Return the text; if it has more than `most` characters, return only the first `most` and its length."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


class TextFormatter(logging.Formatter):
    """Formatter of lines like `2026-11-22T14:03:07.125Z INFO vajra_py.serve.server: message`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`. A message stays on one line, even with line breaks from a client."""
        message = escaped(cut(record.getMessage(), _MOST_CHARACTERS))
        lines = self.formatException(record.exc_info).split("\n") if record.exc_info else []
        trace = "".join(f"\n{escaped(line)}" for line in lines)
        return f"{_time(record)} {record.levelname} {record.name}: {message}{trace}"


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per line.

    Its fields are `time`, `level`, `logger`, `message`, possibly `exception`, and the record's facts.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        row = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": cut(record.getMessage(), _MOST_CHARACTERS),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        line = json.dumps({**row, **getattr(record, FIELDS, {})}, ensure_ascii=False, default=str)
        if line.isprintable():
            return line
        return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in line)


class LimitsRate(logging.Filter):
    """Filter that passes at most one of uvicorn's lines per second and kind, since clients could cause any number of
    lines.

    The next line of a kind states the number of lines that were dropped before. Errors always pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed_at: dict[str, float] = {}
        self._num_unsaid: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        if record.name != "uvicorn.error" or record.levelno > logging.WARNING:
            return True
        kind = str(record.msg)
        if record.created - self._passed_at.get(kind, -_PASS_EVERY_S) < _PASS_EVERY_S:
            self._num_unsaid[kind] += 1
            return False
        if kind in self._passed_at or len(self._passed_at) < _MOST_KINDS:
            self._passed_at[kind] = record.created
        more = self._num_unsaid.pop(kind, 0)
        if more:
            record.msg, record.args = f"{record.getMessage()} ({more} more since the last such line)", None
        return True


class StandardError(logging.Handler):
    """Handler that writes to the current standard error; a line that cannot be written is dropped without an error."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        with suppress(OSError, ValueError):  # e.g. a closed pipe or a full disk
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def _time(record: logging.LogRecord) -> str:
    when = datetime.fromtimestamp(record.created, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def logging_to_stderr(log_format: LogFormat, level: LogLevel) -> Iterator[None]:
    """Log to standard error within the context.

    Lines of this program are written from `level` on, those of libraries from warnings on.
    """
    handler = StandardError()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(LimitsRate())
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
