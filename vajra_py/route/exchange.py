"""One client's request: send it to the server that the core chose, and stream the answer back."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from pydantic_core import from_json
from starlette.types import Receive, Scope, Send

from vajra_py.contract.observer import EndReason
from vajra_py.route.body import for_answer, for_prompt
from vajra_py.route.client import Headers
from vajra_py.route.connections import Connection, ServerAnswer, ServerFault
from vajra_py.route.core import AGAIN, PROMPT
from vajra_py.route.session import Place, Routed, RouteSession
from vajra_py.serve.api.answers import event, failure
from vajra_py.serve.http.access import DIRECT_SEND
from vajra_py.serve.http.eager import begin
from vajra_py.serve.http.errors import ApiError
from vajra_py.serve.http.options import ServeOptions

_STOPPED, _LENGTH = EndReason.STOP.value, EndReason.LENGTH.value
_FAILED = EndReason.FAILED.value
_FINISH = re.compile(rb'"finish_reason": ?"([a-z_]+)"')
_DONE = b"\ndata: [DONE]"
_MOST_TOKENS = 2**20
"""Largest number of output tokens that a server's `usage` may state."""
_KEPT = 64
"""Bytes kept from the end of each piece of a stream, since a finish reason or end mark may extend over two pieces."""
_BUSY = (429, 503)


class StreamScan:
    """Counts the events of a stream and detects its end, without parsing the events."""

    __slots__ = ("_rest", "num_events", "reason", "saw_end")

    def __init__(self) -> None:
        self._rest = b"\n"  # the first piece begins a line
        self.num_events = 0
        self.saw_end = False
        """True if the stream's end was received."""
        self.reason = ""

    def feed(self, piece: bytes) -> None:
        """Scan the next piece."""
        self.num_events += piece.count(b"\n\n")
        if self._rest.endswith(b"\n") and piece.startswith(b"\n"):
            self.num_events += 1
        window = self._rest + piece
        if b"finish_reason" in window:
            found = _FINISH.search(window)
            if found is not None:
                self.reason = found[1].decode()
        if _DONE in window:
            self.saw_end = True
        self._rest = window[-_KEPT:]

    @property
    def num_tokens(self) -> int:
        """Number of tokens received so far, at least 1: estimated as the number of events other than the end mark."""
        return max(1, self.num_events - self.saw_end)

    @property
    def end(self) -> str:
        """Reason of the end, as an `EndReason` value: `stop` or `length`."""
        return _LENGTH if self.reason == "length" else _STOPPED


class Exchange:
    """Forwards one client's request to servers, and answers the client."""

    def __init__(self, session: RouteSession, scope: Scope, raw: bytes, send: Send, options: ServeOptions) -> None:
        self._session = session
        self._scope = scope
        self._raw = raw
        self._send = send
        self._retry_after_s = options.retry_after_s
        self._news = asyncio.Event()
        self._headers = passed_on(scope, has_own_keys=options.has_keys)
        self.routed = Routed(self._on_news)
        self._task: asyncio.Task[None] | None = None
        self._refused: tuple[int, bytes, str] | None = None
        """Status, body and content type of the last refusal by a server; sent to the client if no server answers."""

    def _on_news(self) -> None:
        if self._task is not None and not self.routed.has_begun:
            self._task.cancel()  # end the attempt: the request moved or ended before its server began to answer
        self._news.set()

    async def run(self, receive: Receive) -> None:
        """Answer the client; abort the request if the client disconnects.

        Raises `ApiError` if the request fails before anything was sent to the client.
        """
        answering, has_left = asyncio.current_task(), False
        assert answering is not None

        def leave(_: object) -> None:
            nonlocal has_left
            has_left = True
            answering.cancel()

        leaving = begin(_left(receive))
        if leaving is None:  # the client disconnected while the body of its request was read
            self._session.abort(self.routed)
            return
        leaving.add_done_callback(leave)
        try:
            await self._answer()
        except asyncio.CancelledError:
            if not has_left or answering.uncancel():
                raise
        finally:
            leaving.remove_done_callback(leave)
            leaving.cancel()
            if self.routed.end is None:
                self._session.abort(self.routed)

    async def _answer(self) -> None:
        routed, current = self.routed, asyncio.current_task()
        assert current is not None
        while True:
            while routed.place is None and routed.end is None:
                self._news.clear()
                await self._news.wait()
            place, routed.place = routed.place, None
            if place is None:
                await self._end()
                return
            self._task = asyncio.ensure_future(self._at(place))
            try:
                await self._task  # cancelling the task that runs this method also cancels `_task`
            except asyncio.CancelledError:
                if current.cancelling():
                    raise
            finally:
                self._task = None
            if routed.has_begun:
                return

    async def _end(self) -> None:
        """Send the client the reason why its request ended without an answer."""
        end = self.routed.end
        assert end is not None
        if self._refused is not None and end.reason is EndReason.FAILED:
            status, body, kind = self._refused
            await self._start(status, kind, None)
            await self._send({"type": "http.response.body", "body": body})
            return
        error = failure(end, self._retry_after_s)
        assert error is not None
        raise error

    async def _at(self, place: Place) -> None:
        """Send the request to one server, which computes only the prompt (`place.leaves`) or answers the request."""
        try:
            if place.leaves:
                await self._prompt_at(place)
            else:
                await self._answer_at(place)
        except ServerFault as fault:
            await self._failed(place, fault)

    async def _connect(self, place: Place) -> Connection:
        client = self._session.client
        assert client is not None
        connection = await client.connect(place.url)
        self.routed.is_sent = True  # each caller now sends the request at once
        return connection

    async def _prompt_at(self, place: Place) -> None:
        session, client = self._session, self._session.client
        assert client is not None
        try:
            body = for_prompt(from_json(self._raw))
            connection = await self._connect(place)
            self.routed.kv_params = await client.prompt_params(connection, self._scope["path"], body, self._headers)
        except ServerFault as fault:
            if 400 <= fault.status < 500 and fault.status not in _BUSY:
                self._refused = fault.status, fault.body, "application/json"
                session.answer(self.routed, 0, _FAILED, f"server {place} refuses it: {fault}")
                return
            self.routed.kv_params = None  # without KV, the decode server also computes the prompt
            session.answer(self.routed, 1, PROMPT, f"server {place}: {fault}")
            if fault.is_down:
                # `lose` would assign the server's requests to servers again, even requests with computed prompts.
                # Therefore requests with computed prompts are first sent on to their decode servers.
                session.hand_on()
                session.lose(place, str(fault))
            return
        session.answer(self.routed, 1, PROMPT)

    async def _answer_at(self, place: Place) -> None:
        session, client = self._session, self._session.client
        assert client is not None
        body, request, params = self._raw, self.routed.request, self.routed.kv_params
        self.routed.kv_params = None
        limit = None if request is None or request.admission is None else request.admission.max_tokens
        if limit is not None or params is not None:
            body = for_answer(from_json(body), limit, params)
        connection = await self._connect(place)
        answer = await client.post(connection, self._scope["path"], body, self._headers)
        is_at_end = False
        try:
            if answer.status >= 500 or answer.status == 429:
                text = await client.read(answer, session.settings.max_answer_bytes)
                self._refused = answer.status, text, answer.content_type
                raise ServerFault(f"it answered with status {answer.status}", status=answer.status)
            if answer.status == 200 and answer.content_type.lower().startswith("text/event-stream"):
                is_at_end = await self._stream(place, answer)
            else:
                await self._whole(place, answer)
        finally:
            answer.release(is_at_end=is_at_end)

    async def _whole(self, place: Place, answer: ServerAnswer) -> None:
        session, client = self._session, self._session.client
        assert client is not None
        body = await client.read(answer, session.settings.max_answer_bytes)
        self.routed.has_begun = True
        if answer.status == 200:
            num_tokens, end = read_usage(body)
            session.answer(self.routed, num_tokens, end)
        else:
            session.answer(self.routed, 0, _FAILED, f"server {place} answered {answer.status}")
        await self._start(answer.status, answer.content_type, place, len(body))
        await self._send({"type": "http.response.body", "body": body})

    async def _stream(self, place: Place, answer: ServerAnswer) -> bool:
        """Forward a stream; return True if its end was received.

        Raises `ServerFault` only before anything is forwarded.
        """
        session, routed, scan = self._session, self.routed, StreamScan()
        idle_s, send = session.settings.idle_timeout_s, self._scope.get(DIRECT_SEND, self._send)
        fault = "its stream ended before it was complete"
        try:
            while piece := await answer.read():
                scan.feed(piece)
                if not routed.has_begun:
                    routed.has_begun = True
                    answer.limit(idle_s, f"its stream gave nothing for {idle_s:g} s")
                    session.answer(routed, 1)
                    await self._start(200, "text/event-stream; charset=utf-8", place)
                if scan.saw_end:
                    session.answer(routed, scan.num_tokens, scan.end)
                    await send({"type": "http.response.body", "body": piece})
                    return True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ServerFault as broken:
            fault = str(broken)
        if not routed.has_begun:
            raise ServerFault(fault)
        message = f"server {place}: {fault}"
        session.answer(routed, scan.num_tokens, _FAILED, message)
        error = ApiError(503, message, code="server_failed")
        last = b"\n\n" + event(error.body()) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": last})
        return False

    async def _failed(self, place: Place, fault: ServerFault) -> None:
        """Make the core choose a server again after a fault. Raises `ApiError` if the answer has begun."""
        if self.routed.has_begun:
            raise ApiError(503, f"server {place}: {fault}", code="server_failed")
        if fault.is_down:
            self._session.lose(place, str(fault))
            return
        self._session.answer(self.routed, 0, AGAIN, f"server {place}: {fault}")

    async def _start(self, status: int, kind: str, place: Place | None, length: int | None = None) -> None:
        headers = [(b"content-type", kind.encode("latin-1"))]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        if place is not None:
            headers.append((b"x-vajra-server", str(place).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def passed_on(scope: Scope, *, has_own_keys: bool) -> Headers:
    """Return the client's headers to forward to servers; the API key is left out if the router has its own keys."""
    kept: tuple[bytes, ...] = (b"x-request-id", b"traceparent", b"tracestate", b"accept")
    if not has_own_keys:
        kept = (*kept, b"authorization")
    return [one for one in scope["headers"] if one[0] in kept]


def read_usage(body: bytes) -> tuple[int, str]:
    """Return the number of output tokens of an answer, and the reason of its end; (1, stop) if either is missing.

    A number that no answer can have counts as 1.
    """
    try:
        answer: Any = from_json(body)
        reason = answer["choices"][0]["finish_reason"]
        num_tokens = answer["usage"]["completion_tokens"]
    except (ValueError, KeyError, IndexError, TypeError):
        return 1, _STOPPED
    is_count = type(num_tokens) is int and 1 <= num_tokens <= _MOST_TOKENS
    return num_tokens if is_count else 1, _LENGTH if reason == "length" else _STOPPED
