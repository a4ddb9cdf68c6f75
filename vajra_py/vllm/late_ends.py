"""Report ends of requests to a connector under asynchronous scheduling.

When a step is formed, the mechanism ends each request that has reached its maximum length, although the step before may
still write the request's blocks. A connector is notified of an end when the last token is known, as by vLLM's own
scheduler. The request keeps its blocks until the connector has been notified and no step in flight writes them, and, if
the connector requires it, until they have been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from vajra_py.vllm.mechanism import Request


class LateEnds:
    """Requests that have ended for the mechanism or the connector, but not for both, and those that keep their blocks
    after their end.
    """

    def __init__(self, is_written: Callable[[str], bool]) -> None:
        """Create an empty set; `is_written` returns whether a step in flight computes tokens of a request."""
        self.is_written = is_written
        self._answers: dict[str, bool] = {}
        """Answers for requests that ended for the connector but not yet in the mechanism: True if the connector keeps
        their blocks.
        """
        self._kept: dict[Request, bool] = {}
        """Requests that have ended in the mechanism and keep their blocks; True if the connector has answered that it
        needs the blocks.
        """
        self._unreported: dict[str, Request] = {}
        """Requests that have ended in the mechanism and whose end has not been reported to the connector, by name."""

    def note_end(self, name: str, *, wants: bool) -> None:
        """Record that the connector was notified of an end; `wants` is True if the connector keeps the request's
        blocks.
        """
        request = self._unreported.pop(name, None)
        if request is None:
            self._answers[name] = wants
        else:
            self._kept[request] = wants

    def ends(self, request: Request) -> bool | None:
        """Return whether a request ended by the mechanism keeps its blocks; None: the connector must be called now."""
        name = request.request_id
        answer = self._answers.pop(name, None)
        is_written = self.is_written(name)
        if answer is None and not is_written:
            return None
        if answer is None:
            self._unreported[name] = request
        if answer or is_written:
            self._kept[request] = bool(answer)
            return True
        return False

    def sent(self, request: Request) -> None:
        """Record that the connector has sent the blocks of a request."""
        self._kept[request] = False

    @property
    def unreported(self) -> Collection[Request]:
        """Requests that have ended in the mechanism and whose last token is not known yet."""
        return self._unreported.values()

    def void(self, request: Request) -> None:
        """Cancel the report of a request's end: its last step is void, so its client still awaits tokens."""
        self._unreported.pop(request.request_id, None)

    def forget(self, request: Request) -> None:
        """Drop the connector's answer for a request whose blocks are freed because a policy broke the contract."""
        self._answers.pop(request.request_id, None)

    @property
    def num_waiting(self) -> int:
        """Number of ended requests that keep their blocks although the connector has not answered that it needs the
        blocks.
        """
        return len(self._kept) - sum(self._kept.values())

    def take_released(self) -> list[Request]:
        """Return and remove the requests that no longer need their blocks; call it after a step has returned."""
        released = [one for one, wants in self._kept.items() if not (wants or self._is_held(one))]
        for request in released:
            del self._kept[request]
        return released

    def _is_held(self, request: Request) -> bool:
        return self._unreported.get(request.request_id) is request or self.is_written(request.request_id)
