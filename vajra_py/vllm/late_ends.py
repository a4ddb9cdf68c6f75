"""Ends of requests under asynchronous scheduling, as reported to a connector.

The mechanism ends a request whose length is reached when the next step is formed, and the step before may still write its blocks. A
connector is notified of an end when the last token is known, as by vLLM's own scheduler. The request keeps its blocks until both has
happened, and, if the connector wants them, until they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from vajra_py.vllm.mechanism import Request


class LateEnds:
    """Requests that have ended for the mechanism or for the connector, until both have noted it and no step writes their blocks."""

    def __init__(self, is_written: Callable[[str], bool]) -> None:
        """`is_written` returns by name whether a step that has not come back computes tokens of a request."""
        self.is_written = is_written
        self._answers: dict[str, bool] = {}
        """Requests that ended for the connector and not yet in the mechanism: whether it wants their blocks."""
        self._kept: dict[Request, bool] = {}
        """Requests that the mechanism has ended and that keep their blocks: whether the connector wants these, as far as is known."""
        self._unreported: dict[str, Request] = {}
        """Requests of `_kept` of whose end the connector has not been notified."""

    def note_end(self, name: str, *, wants: bool) -> None:
        """Note that the connector was notified of an end, and whether it wants the blocks."""
        request = self._unreported.pop(name, None)
        if request is None:
            self._answers[name] = wants
        else:
            self._kept[request] = wants

    def ends(self, request: Request) -> bool | None:
        """Return True if a request that the mechanism ends keeps its blocks, False if not; None: the connector is to be called now."""
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
        """Note that the connector has sent the blocks of a request."""
        self._kept[request] = False

    @property
    def unreported(self) -> Collection[Request]:
        """Requests that the mechanism has ended, and whose last token is not known."""
        return self._unreported.values()

    def void(self, request: Request) -> None:
        """Let a request whose last step is void, so that it has not ended for its client, keep no blocks."""
        self._unreported.pop(request.request_id, None)

    def forget(self, request: Request) -> None:
        """Forget a request that the mechanism has lost with its blocks."""
        self._answers.pop(request.request_id, None)

    @property
    def num_waiting(self) -> int:
        """Requests that keep blocks which the connector does not want."""
        return len(self._kept) - sum(self._kept.values())

    def take_released(self) -> list[Request]:
        """Return the requests that need their blocks no longer, now that a step has come back."""
        released = [one for one, wants in self._kept.items() if not (wants or self._is_held(one))]
        for request in released:
            del self._kept[request]
        return released

    def _is_held(self, request: Request) -> bool:
        return self._unreported.get(request.request_id) is request or self.is_written(request.request_id)
