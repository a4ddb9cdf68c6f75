"""Report ends of requests to vLLM's clients, including ends without a further token."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

_log = logging.getLogger(__name__)
_MOST_STREAMS = 10_000


@dataclass(slots=True)
class _Failed:
    """A request that ends without a further token, and the reason reported to its client."""

    request: VllmRequest
    reason: FinishReason
    why: str


class Endings:
    """Ends that have not been reported yet."""

    def __init__(self, *, lists_finished: bool) -> None:
        self._failed: list[_Failed] = []
        self._finished: dict[int, set[str]] | None = {} if lists_finished else None
        """Ids of ended requests by client index, so that clients stop tracking them; None if unused."""

    @property
    def is_pending(self) -> bool:
        """True if ends remain to be reported."""
        return bool(self._failed or self._finished)

    def fail(self, request: VllmRequest, reason: FinishReason, why: str) -> None:
        """Add the end of a request for `reason`; `why` is the explanation for its client."""
        is_error = reason is FinishReason.ERROR
        request.status = RequestStatus.FINISHED_ERROR if is_error else RequestStatus.FINISHED_ABORTED
        self._failed.append(_Failed(request, reason, why))

    def take_back(self, name: str) -> VllmRequest | None:
        """Remove and return a request with a pending end, because its client aborts it; None if no end is pending."""
        for failed in self._failed:
            if failed.request.request_id == name:
                self._failed.remove(failed)
                return failed.request
        return None

    def note_finished(self, client_index: int, name: str) -> None:
        """Record that this request has ended. The next message to its client lists the request, so that the client
        stops tracking it.
        """
        if self._finished is not None:
            self._finished.setdefault(client_index, set()).add(name)

    def with_ends(
        self, outputs: dict[int, list[EngineCoreOutput]], requests: dict[str, VllmRequest]
    ) -> dict[int, EngineCoreOutputs]:
        """Return the message for each client, by client index, with these outputs and the pending ends.

        Requests whose end was pending are removed from `requests`.
        """
        for failed in self._failed:
            request = failed.request
            requests.pop(request.request_id, None)
            self.note_finished(request.client_index, request.request_id)
            _log.warning("request %s ends: %s", request.request_id, failed.why)
            outputs.setdefault(request.client_index, []).append(_output_of(failed))
        self._failed.clear()
        by_client = {client: EngineCoreOutputs(outputs=each) for client, each in outputs.items()}
        if self._finished:
            for client, names in self._finished.items():
                by_client.setdefault(client, EngineCoreOutputs()).finished_requests = names
            self._finished = {}
        return by_client


class RefusedStreams:
    """Requests with streamed input, which is unsupported.

    The first chunk of a stream is refused. Further chunks are ignored until the refusal has been reported to the
    client; a chunk after that is refused again.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def answers(self, request: VllmRequest, requests: Mapping[str, VllmRequest]) -> bool:
        """Return True if a new request must be ignored, because it ends a refused stream or its id is in use."""
        name = request.request_id
        is_known = name in self._names
        if is_known and not request.resumable:  # this request ends the refused stream
            del self._names[name]
            return True
        if name in requests:
            if not is_known:  # not a chunk of a refused stream, whose client gets the refusal
                _log.error("another request with the id %s is being served; this one is left out", name)
            return True
        if request.resumable:
            self._names[name] = None
            if len(self._names) > _MOST_STREAMS:
                del self._names[next(iter(self._names))]
        return False


def _output_of(failed: _Failed) -> EngineCoreOutput:
    output: Any = EngineCoreOutput(
        failed.request.request_id,
        [],
        finish_reason=failed.reason,
        stop_reason=failed.why,
        events=failed.request.take_events(),
    )
    if failed.reason is FinishReason.ERROR and hasattr(output, "error"):  # vLLM 0.33 passes `error` to the client
        from vllm.outputs import RequestError

        output.error = RequestError(code="internal_error", message=failed.why)
    return output
