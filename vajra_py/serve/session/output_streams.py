"""Deliver outputs from the engine's thread to the event loop.

The engine's thread leaves a note on a stream and wakes the event loop once for everything that it left since. One callback
there brings all streams up to date and wakes each response once; a stream writes right away, so that no task is woken for a
token.

Invariants:
    - A stream ends exactly once, with a reason; nothing follows.
    - A note is a snapshot: its fields (number of tokens, text) belong together, whatever the engine does meanwhile.
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


@dataclass(frozen=True, slots=True)
class End:
    """End of a request.

    Attributes:
        reason: why.
        detail: the same in words, where there is more detail.
        stopped_by: the stop string or token that ended it.
        metrics: times of its events; None where the engine never reported them.
        retry_after_s: when its client may try again, by the admission policy; None: it names none.
    """

    reason: EndReason
    detail: str = ""
    stopped_by: str | int | None = None
    metrics: RequestMetrics | None = None
    retry_after_s: float | None = None


@dataclass(slots=True, eq=False)
class OutputStream:
    """One output of a request, as far as the event loop's thread has it.

    Attributes:
        index: which output of its response.
        submission: what the engine was given.
        num_tokens: tokens so far.
        text: text so far that a client may see.
        end: its end; None: it goes on.
        hides_output: whether the client wants the prompt alone, and not what the engine put out after it.
        degraded: with what the admission policy let it in instead of what it asked for; empty: as it asked, or not known yet.
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
        """The engine's name for it."""
        return self.submission.facts.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.submission.prompt_token_ids)

    def token_ids(self, start: int = 0) -> Sequence[int]:
        """Return the tokens that this stream has, from the `start`-th on."""
        return self.submission.output.token_ids[start : self.num_tokens]

    def logprobs(self, start: int = 0) -> Sequence[TokenLogprobs]:
        """Return the log-probabilities of the same tokens, where they were asked for."""
        return self.submission.output.logprobs[start : self.num_tokens]


@dataclass(slots=True, eq=False)
class ResponseState:
    """The outputs of one HTTP request, whose handler waits for any of them.

    Attributes:
        is_streaming: whether every step matters, or only the end of each output.
        outputs: of the request.
        on_change: called when outputs have changed, once for all that have.
    """

    is_streaming: bool = False
    outputs: list[OutputStream] = field(default_factory=list)
    on_change: Callable[[], None] | None = None
    _num_ended: int = 0
    _changed: dict[OutputStream, None] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """True when every output has ended."""
        return self._num_ended == len(self.outputs)

    def answerable(self) -> asyncio.Future[None]:
        """Return a future that is done when an answer can begin: with the first news of a stream, otherwise when every output has ended."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def check() -> None:
            if (self.is_streaming or self.is_done) and not ready.done():
                ready.set_result(None)

        self.on_change = check
        return ready

    def take(self) -> Collection[OutputStream]:
        """Return the outputs that have changed since they were taken last, in the order in which it came."""
        changed, self._changed = self._changed, {}
        return changed

    def note(self, stream: OutputStream, note: Note) -> None:
        """Bring a stream up to date; in the event loop's thread."""
        if stream.end is not None:
            return
        stream.num_tokens, stream.text, stream.end = (0, "", note[2]) if stream.hides_output else note
        self._num_ended += stream.end is not None
        self._changed[stream] = None


Note = tuple[int, str, End | None]
"""(tokens so far, text so far, end)."""


_PAUSE_PER_DELIVERY = 4.0
_MAX_PAUSE_S = 0.025


class LoopBridge:
    """Notes from the engine's thread to the event loop's; one wake-up for all that were left since the last.

    After a delivery there is none for four times as long as it took, or 25 ms. Where steps are shorter than that, several
    tokens of a stream are written together, so that writing takes no more than about a fifth of the interpreter from the
    engine, however fast the model and however many the streams; where steps are longer, nothing waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._notes: deque[tuple[OutputStream, Note]] = deque()
        self._woken = False
        self._not_before = 0.0

    def post(self, stream: OutputStream, note: Note) -> None:
        """Leave a note; from any thread."""
        self._notes.append((stream, note))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the event loop is closed: there are no readers
                self._notes.clear()

    def _deliver(self) -> None:
        started = self._loop.time()
        if started < self._not_before:
            self._loop.call_at(self._not_before, self._deliver)
            return
        self._woken = False  # cleared before reading, so that a later note wakes the loop again
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
        """Call something in the event loop's thread; from any thread."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function)

    def connect(self, stream: OutputStream) -> None:
        """Let a stream's submission report here."""

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
    """Return the words that a client gets for what ended the engine."""
    if error is None:
        return "the server is shutting down"
    return str(error) if isinstance(error, VajraError) else "the engine has failed; the server's log says why"
