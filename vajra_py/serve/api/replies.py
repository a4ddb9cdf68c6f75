"""Send responses to clients, and abort generation when a client disconnects.

Invariants:
    - However a generation ends (answer complete, client disconnected, server failure), the computation of all its
      outputs stops.
    - A started stream ends with `[DONE]`, even after an error; a failure before the first token has an HTTP error
      status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from vajra_py.serve.api.answers import Answer, degraded_headers, encoded, event, failure
from vajra_py.serve.http.access import ANSWER_ID, DIRECT_SEND
from vajra_py.serve.http.eager import begin
from vajra_py.serve.http.errors import ApiError
from vajra_py.serve.session.output_streams import OutputStream, ResponseState
from vajra_py.serve.session.session import EngineSession, Unavailable

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP generation request, from submission to the last byte.

    Attributes:
        session: session that computes the outputs.
        answer: formats the outputs.
        retry_after_s: seconds after which a client may retry, sent with errors that a retry may resolve.
        on_broken_stream: called when a started stream ends with an error.
        release: called once, when the request is finished.
    """

    session: EngineSession
    answer: Answer
    retry_after_s: float
    on_broken_stream: Callable[[], None]
    release: Callable[[], None]

    async def respond(self, request: Request) -> Response:
        """Submit the outputs and return the response. Raises `ApiError` for failures before anything was sent."""
        request.scope[ANSWER_ID] = self.answer.name
        response, client = self.answer.response, _Client(request.receive)
        handed_on = False
        try:
            answerable = response.answerable()
            self._submit(response)
            if await client.leaves_before(answerable):
                return _Nothing()
            self._check(response.outputs)
            if not response.is_streaming:
                headers = degraded_headers(response.outputs)
                return Response(encoded(self.answer.whole()), media_type="application/json", headers=headers)
            handed_on = True
            return _Stream(self, client)
        finally:
            if not handed_on:
                client.let_go()
                self.finish()

    def _submit(self, response: ResponseState) -> None:
        try:
            self.session.submit(response.outputs)
        except Unavailable as error:
            raise ApiError(503, str(error), code="unavailable", retry_after_s=self.retry_after_s) from None

    def _check(self, streams: list[OutputStream]) -> None:
        for stream in streams:
            error = None if stream.end is None else failure(stream.end, self.retry_after_s)
            if error is not None:
                raise error

    def finish(self) -> None:
        """Release the request, and abort outputs that have not ended, for example after the client disconnected."""
        self.session.abort(self.answer.response.outputs)
        self.release()


class _Client:
    """The client of a request, whose disconnection is watched."""

    def __init__(self, receive: Receive) -> None:
        self._left = asyncio.ensure_future(_left(receive))

    async def leaves_before(self, event: asyncio.Future[None]) -> bool:
        """Wait for the event or for disconnection; return True if the client disconnected. Raises the event's error."""
        if not event.done():
            await asyncio.wait({event, self._left}, return_when=asyncio.FIRST_COMPLETED)
        if not event.done():
            event.cancel()
            return True
        event.result()
        return False

    def let_go(self) -> None:
        """Stop watching for disconnection."""
        self._left.cancel()


async def _left(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Nothing(Response):
    """Response for a client that has disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send status 499, for the access log only; nothing is transmitted, since the connection is closed."""
        await send({"type": "http.response.start", "status": 499, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class _Stream(Response):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, client: _Client) -> None:
        degraded = degraded_headers(generation.answer.response.outputs)
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **degraded})
        del self.headers["content-length"]
        self._generation = generation
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each event as soon as it exists, until the last one is sent or the client disconnects."""
        writer = _Writer(self._generation, scope.get(DIRECT_SEND, send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._client.leaves_before(writer.begin())
        finally:
            writer.stop()
            self._client.let_go()
            self._generation.finish()


class _Writer:
    """Writes a stream's events directly in the callback that announces changed outputs.

    While a client does not read what was sent, further tokens of each output accumulate; they are sent as one chunk
    afterwards.
    """

    def __init__(self, generation: Generation, send: Send) -> None:
        self._generation = generation
        self._send = send
        self._sending: asyncio.Task[None] | None = None
        """Task that waits for a slow client; None if there is none."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self) -> asyncio.Future[None]:
        """Write all events so far, and each later one as soon as it exists.

        Return a future that is done when the last event was sent, or that has the error that ended the stream.
        """
        self._generation.answer.response.on_change = self._write
        self._write()
        return self._ended

    def stop(self) -> None:
        """Stop writing."""
        self._generation.answer.response.on_change = None
        if self._sending is not None:
            self._sending.cancel()

    def _write(self) -> None:
        """Write new events, unless the client has not yet read earlier ones."""
        if self._sending is not None:
            return
        try:
            events, is_last = self._events(self._generation.answer.response.take())
            if not events:
                return
            body = {"type": "http.response.body", "body": b"".join(events), "more_body": not is_last}
            self._sending = begin(self._send(body))
        except Exception as error:  # an error in one stream must not affect the other streams of this callback
            self._end(error)
            return
        if self._sending is not None:
            self._sending.add_done_callback(lambda task: self._sent(task, is_last))
        elif is_last:
            self._end(None)

    def _sent(self, task: asyncio.Task[None], is_last: bool) -> None:
        """Continue writing after a slow client has read the earlier data."""
        if task.cancelled():
            return
        self._sending = None
        if is_last or task.exception() is not None:
            self._end(task.exception())
        else:
            self._write()

    def _end(self, error: BaseException | None) -> None:
        self._generation.answer.response.on_change = None
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _events(self, changed: Collection[OutputStream]) -> tuple[list[bytes], bool]:
        """Return the new events of these outputs, and True if they are the last of the stream."""
        answer = self._generation.answer
        events = answer.events(changed)
        ends = [stream.end for stream in changed if stream.end is not None]
        if not ends:
            return events, False
        errors = (failure(end, self._generation.retry_after_s) for end in ends)
        error = next((one for one in errors if one is not None), None)
        if error is not None:
            self._generation.on_broken_stream()
            return [*events, event(error.body()), _DONE], True
        if answer.response.is_done:
            return [*events, answer.last_event(), _DONE], True
        return events, False


def now_s() -> int:
    """Return the time in seconds since 1970, as in OpenAI's answers."""
    return int(time.time())
