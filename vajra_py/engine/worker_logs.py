"""Log lines of worker processes, written in the format of their parent process."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

_PACKAGES = ("vajra_py", "vajra_kernels")


@dataclass(frozen=True, slots=True)
class WorkerLogs:
    """Logging configuration for a worker process, which writes to standard error.

    Attributes:
        formatter: formatter of each line.
        levels: threshold by logger name; the empty name is the root logger.
    """

    formatter: logging.Formatter
    levels: Mapping[str, int]

    @classmethod
    def of_this_process(cls) -> Self | None:
        """Return the configuration of this process; None if none is set, or if it cannot be sent to another process."""
        handlers = reversed(logging.getLogger().handlers)  # the handler that was added last determines the format
        formatter = next((one.formatter for one in handlers if one.formatter is not None), None)
        if formatter is None:
            return None
        made = cls(formatter, {name: logging.getLogger(name).level for name in ("", *_PACKAGES)})
        try:
            pickle.dumps(made)
        except Exception:  # a program's own formatter may contain objects that cannot be pickled
            return None
        return made

    def install(self) -> None:
        """Configure logging of this process."""
        handler = logging.StreamHandler()
        handler.setFormatter(self.formatter)
        logging.getLogger().addHandler(handler)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
