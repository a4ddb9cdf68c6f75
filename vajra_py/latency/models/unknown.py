"""Placeholder latency model that raises a clear error for every prediction."""

from __future__ import annotations

from typing import NoReturn

from vajra_py.contract.latency import BatchFeatures
from vajra_py.errors import ConfigError, Problem


class NoPredictions:
    """Latency model without predictions; its errors name the missing setting."""

    num_stages = 1

    def __init__(self, setting: str) -> None:
        self._setting = setting

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Raise `ConfigError`."""
        self._refuse()

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Raise `ConfigError`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        message = "is missing, and a policy needs predicted step times"
        allowed = "A latency model, such as {type: profiled, path: FILE} from `vajra profile`"
        raise ConfigError(Problem(self._setting, message, allowed))
