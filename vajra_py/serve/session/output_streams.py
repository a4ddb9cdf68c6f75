"""Deliver outputs from the engine's thread to the event loop.

The engine's thread posts a note about a stream and wakes the event loop once for all notes since the last wake-up. One
callback in the event loop updates all streams and notifies each response once; a response writes directly in that
callback, so that no task is woken per token.

Invariants:
    - A stream ends exactly once, with a reason; later notes have no effect.
    - A note is a snapshot: its fields (number of tokens, text) are consistent, even if the engine continues meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from vajra_py.contract.observer import EndReason
from vajra_py.engine.compute import TokenLogprobs
from vajra_py.engine.outputs import Submission
from vajra_py.engine.requests import RequestMetrics
from vajra_py.errors import VajraError
from vajra_py.runtime.requests.request import Request

SHUTTING_DOWN = "the server is shutting down"
"""Detail of the end of requests that a shutdown ends."""


@dataclass(frozen=True, slots=True)
class End:
    """End of a request.

    Attributes:
        reason: reason of the end.
        detail: further description of the reason; may be empty.
        stopped_by: stop string or token that ended the request; None if it ended otherwise.
        metrics: times of the request's events; None if the engine never reported them.
        retry_after_s: seconds after which the client may retry, stated by the admission policy; None: not stated.
    """

    reason: EndReason
    detail: str = ""
    stopped_by: str | int | None = None
    metrics: RequestMetrics | None = None
    retry_after_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """True if the output is complete; False if it was refused, aborted, or failed."""
        return self.reason in (EndReason.STOP, EndReason.LENGTH)


@dataclass(slots=True, eq=False)
class OutputStream:
    """One output of a request, as seen by the event loop's thread.

    Attributes:
        index: index of the output in its response.
        submission: submission to the engine.
        response: response that the output belongs to.
        hides_output: True if the client requested only the prompt, and no generated tokens.
        num_tokens: number of tokens so far.
        text: text so far that may be sent to the client.
        end: end of the output; None: it continues.
        degraded: reduced limits under which the admission policy accepted the request; empty: the requested limits
            apply, or the decision is not known yet.
    """

    index: int
    submission: Submission
    response: ResponseState
    hides_output: bool = False
    num_tokens: int = 0
    text: str = ""
    end: End | None = None
    degraded: str = ""

    @property
    def request_id(self) -> str:
        """Id of the request in the engine."""
        return self.submission.facts.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.submission.prompt_token_ids)

    def token_ids(self, start: int = 0) -> Sequence[int]:
        """Return the tokens of this stream from index `start` on."""
        return self.submission.output.token_ids[start : self.num_tokens]

    def logprobs(self, start: int = 0) -> Sequence[TokenLogprobs]:
        """Return the log-probabilities of the tokens from index `start` on; empty unless the request has `logprobs`."""
        return self.submission.output.logprobs[start : self.num_tokens]


@dataclass(slots=True, eq=False)
class ResponseState:
    """Outputs of one HTTP request, whose handler waits for changes.

    Attributes:
        is_streaming: True if every step is reported; False if only the end of each output is reported.
        outputs: outputs of the request.
        on_change: called once per delivery in which outputs have changed.
    """

    is_streaming: bool = False
    outputs: list[OutputStream] = field(default_factory=list)
    on_change: Callable[[], None] | None = None
    _num_ended: int = 0
    _has_failed: bool = False
    _changed: dict[OutputStream, None] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """True if every output has ended."""
        return self._num_ended == len(self.outputs)

    def answerable(self) -> asyncio.Future[None]:
        """Return a future that is done when the answer can begin.

        A stream can begin with the first change, any other answer when every output has ended or one has failed.
        """
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def check() -> None:
            if (self.is_streaming or self.is_done or self._has_failed) and not ready.done():
                ready.set_result(None)

        self.on_change = check
        return ready

    def take(self) -> Collection[OutputStream]:
        """Return the outputs changed since the last call, in the order in which they first changed."""
        changed, self._changed = self._changed, {}
        return changed

    def note(self, stream: OutputStream, note: Note) -> None:
        """Update a stream with a note; called in the event loop's thread."""
        if stream.end is not None:
            return
        stream.num_tokens, stream.text, stream.end = (0, "", note[2]) if stream.hides_output else note
        if stream.end is not None:
            self._num_ended += 1
            self._has_failed = self._has_failed or not stream.end.is_complete
        self._changed[stream] = None


Note = tuple[int, str, End | None]
"""A stream's state: (number of tokens so far, text so far, end or None)."""


_PAUSE_PER_DELIVERY = 4.0
_MAX_PAUSE_S = 0.025


class LoopBridge:
    """Channel for notes from the engine's thread to the event loop's thread, with one wake-up of the event loop for all
    notes since the previous delivery.

    After a delivery, the next one waits four times as long as the delivery took, up to 25 ms. If steps are shorter than
    this pause, several tokens of a stream are written together. Writing thus takes at most about a fifth of the
    interpreter's time, however fast the model is, as long as a delivery takes no more than 6 ms. If steps are longer
    than the pause, no note is delayed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._notes: deque[tuple[OutputStream, Note]] = deque()
        self._woken = False
        self._not_before = 0.0

    def post(self, stream: OutputStream, note: Note) -> None:
        """Post a note. Thread-safe."""
        self._notes.append((stream, note))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the event loop is closed, so no client is left
                self._notes.clear()

    def _deliver(self) -> None:
        started = self._loop.time()
        if started < self._not_before:
            self._loop.call_at(self._not_before, self._deliver)
            return
        self._woken = False  # cleared before notes are read, so that a later note wakes the loop again
        responses: dict[ResponseState, None] = {}
        while self._notes:
            stream, note = self._notes.popleft()
            stream.response.note(stream, note)
            responses[stream.response] = None
        for response in responses:
            if response.on_change is not None:
                response.on_change()
        ended = self._loop.time()
        self._not_before = ended + min(_MAX_PAUSE_S, _PAUSE_PER_DELIVERY * (ended - started))

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the event loop's thread. Thread-safe."""
        with suppress(RuntimeError):  # raised if the event loop is closed
            self._loop.call_soon_threadsafe(function)

    def connect(self, stream: OutputStream) -> None:
        """Make the engine post a note to the stream whenever the stream's submission progresses or ends."""

        def progress(submission: Submission, request: Request, reason: EndReason | None) -> None:
            output, admission = submission.output, request.admission
            end = None
            if admission is not None:
                stream.degraded = admission.degraded
            if reason is not None:
                retry_s = None if admission is None else admission.retry_after_s
                end = End(reason, request.detail, output.stopped_by, RequestMetrics.of(request), retry_s)
            self.post(stream, (len(output.token_ids), output.text, end))

        def engine_ended(error: BaseException | None) -> None:
            output = stream.submission.output
            self.post(stream, (len(output.token_ids), output.text, End(EndReason.FAILED, _detail_of(error))))

        stream.submission.on_progress = progress
        stream.submission.on_engine_end = engine_ended
        stream.submission.follows_steps = stream.response.is_streaming


def _detail_of(error: BaseException | None) -> str:
    """Return the message for clients about the error that ended the engine; None: the server is shutting down."""
    if error is None:
        return SHUTTING_DOWN
    return str(error) if isinstance(error, VajraError) else "the engine has failed; the server's log says why"
