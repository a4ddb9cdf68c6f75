"""Deliver request events to policies and attribute their failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vajra_py.contract import ListensToRequests, RequestView
from vajra_py.errors import PolicyError, VajraError


class NamedListener:
    """A listening policy under its registered name: what it raises becomes a `PolicyError`."""

    __slots__ = ("_name", "_policy")

    def __init__(self, policy: ListensToRequests, name: str) -> None:
        self._policy = policy
        self._name = name

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Requests that have just been accepted."""
        self._tell(self._policy.on_arrivals, requests, now)

    def on_step_end(self, requests: Sequence[RequestView], now: float) -> None:
        """Requests that took part in the step that has just ended."""
        self._tell(self._policy.on_step_end, requests, now)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Requests that have left for good."""
        self._tell(self._policy.on_departures, requests, now)

    def _tell(
        self, method: Callable[[Sequence[RequestView], float], None], requests: Sequence[RequestView], now: float
    ) -> None:
        try:
            method(requests, now)
        except VajraError:
            raise
        except Exception as error:
            request_id = requests[0].request_id if len(requests) == 1 else None
            raise PolicyError.caused_by(self._name, error, request_id=request_id) from error
