"""How is an answer sent while its client listens, and what happens when the client goes away?

Invariants:
    - Whatever ends an exchange (answer complete, client gone, server failing), no output of it goes on being computed.
    - A stream that has begun ends with `[DONE]`, after an error too; what fails before the first token has a status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from vajra_py.serve.answers import Answer, encoded, failure
from vajra_py.serve.errors import ApiError
from vajra_py.serve.session import EngineSession, Unavailable
from vajra_py.serve.tickets import Reply, Ticket

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One HTTP request that generates, from submission to the last byte."""

    session: EngineSession
    answer: Answer
    retry_after_s: float
    release: Callable[[], None]
    """Called once, when nothing of it is left."""

    async def respond(self, request: Request) -> Response:
        """Submit and answer. Raises `ApiError` for what fails before anything was sent."""
        reply = self.answer.reply
        handed_on = False
        try:
            self._submit(reply)
            if not reply.streams:
                if await _unless_gone(request.receive, reply.done()):
                    return _Nothing()
                self._check(reply.tickets)
                return Response(encoded(self.answer.whole()), media_type="application/json")
            first: list[Ticket] = []

            async def begun() -> None:
                first.extend(await reply.changes())

            if await _unless_gone(request.receive, begun()):
                return _Nothing()
            self._check(first)
            handed_on = True
            return _Stream(self, first)
        finally:
            if not handed_on:
                self.finish()

    def _submit(self, reply: Reply) -> None:
        try:
            self.session.submit(reply.tickets)
        except Unavailable as error:
            raise ApiError(503, str(error), code="unavailable", retry_after_s=self.retry_after_s) from None

    def _check(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            error = None if ticket.end is None else failure(ticket.end, self.retry_after_s)
            if error is not None:
                raise error

    def finish(self) -> None:
        """Nobody waits any longer; what still runs is taken back."""
        self.session.abort(self.answer.reply.tickets)
        self.release()


class _Nothing(Response):
    """For a client that has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing that anyone could read."""
        await send({"type": "http.response.start", "status": 499, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class _Stream(Response):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, first: list[Ticket]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send pieces as they come, until the last one or until the client has gone."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _unless_gone(receive, self._send_all(send))
        finally:
            self._exchange.finish()

    async def _send_all(self, send: Send) -> None:
        exchange, changed = self._exchange, self._first
        answer, reply = exchange.answer, exchange.answer.reply
        while True:
            parts = [b"data: " + piece + b"\n\n" for piece in answer.pieces(changed)]
            error = None
            for ticket in changed:
                error = error or (None if ticket.end is None else failure(ticket.end, exchange.retry_after_s))
            if error is not None:
                parts.append(b"data: " + encoded(error.body()) + b"\n\n")
            is_last = error is not None or reply.is_done
            if is_last:
                last = answer.last_piece()
                if last is not None and error is None:
                    parts.append(b"data: " + last + b"\n\n")
                parts.append(_DONE)
            if parts:
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": not is_last})
            if is_last:
                return
            changed = await reply.changes()


async def _unless_gone(receive: Receive, work: Awaitable[None]) -> bool:
    """Do the work unless the client goes away first; whether it went. The work is cancelled then, and when this is."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return True
        task.result()
        return False
    finally:
        for one in (task, watch):
            if not one.done():
                one.cancel()


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def now_s() -> int:
    """Seconds since 1970, as OpenAI dates answers."""
    return int(time.time())
