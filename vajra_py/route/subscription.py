"""Follow a server's KV events over ZeroMQ: subscribe, request missed batches, and clear the index if these cannot be
replayed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from vajra_py.route.config import KvEventsConfig
from vajra_py.route.kv_events import ServerBlocks
from vajra_py.runtime.records.input_log import CacheReport

_log = logging.getLogger(__name__)
_REPLAY_S = 5.0
"""Maximum time to wait for a message of the replay socket, seconds."""
_HEARTBEAT_MS = 2000
_MOST_QUEUED = 100_000
"""Maximum number of unread batches; further ones are lost and requested again."""
_MOST_BYTES = 64 * 2**20
"""Maximum size of a batch in bytes; a larger one closes the connection."""
_END = (-1).to_bytes(8, "big", signed=True)


class Subscription:
    """Subscription to one server's KV events: updates the index of its blocks and reports changes."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        key: tuple[str, int],
        settings: KvEventsConfig,
        blocks: ServerBlocks,
        on_report: Callable[[CacheReport], None],
    ) -> None:
        """Create a subscription; `run` starts it.

        Args:
            context: ZeroMQ context.
            key: replicaset and replica of the server.
            settings: addresses of the server's events.
            blocks: index to update.
            on_report: called with changes, in the event loop's thread.
        """
        self._context = context
        self._key = key
        self._name = f"{key[0]}/{key[1]}"
        self._settings = settings
        self._blocks = blocks
        self._on_report = on_report
        self._turn = asyncio.Lock()
        self._next: int | None = None
        """Sequence number of the next batch; None to accept any."""
        self.is_following = False
        """True while the subscription is connected and the index is up to date."""
        self._is_new = True
        """True if the next report replaces all earlier content."""
        self._warned: set[str] = set()

    async def run(self) -> None:
        """Follow the events until cancelled."""
        socket = self._socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, self._settings.topic.encode())
        monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        watching = asyncio.ensure_future(self._watch(monitor))
        try:
            socket.connect(self._settings.endpoint)
            while True:
                frames = await socket.recv_multipart()
                async with self._turn:
                    if self.is_following:
                        await self._take(frames)
        finally:
            watching.cancel()
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    async def restart(self) -> None:
        """If connected, clear the index and apply the batches that the server keeps for replay; called after the router
        has dropped the server's cached content.
        """
        async with self._turn:
            if self.is_following:
                await self._begin()

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, _MOST_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            async with self._turn:
                if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                    _log.info("%s: KV events are followed (%s)", self._name, self._settings.endpoint)
                    await self._begin()
                elif self.is_following:
                    _log.warning("%s: its KV events have broken off", self._name)
                    self.is_following = False
                    self._report(ends=True)

    async def _begin(self) -> None:
        """Clear the index, and apply the batches that the server keeps for replay."""
        self._void()
        self._next = None
        await self._replay(0)
        self.is_following = True
        self._notify()

    async def _take(self, frames: Sequence[bytes]) -> None:
        """Apply the next batch, after replaying any missed before it."""
        number = int.from_bytes(frames[-2], "big") if len(frames) > 1 else 0
        if number == 0 and self._next:  # numbers begin again: the publisher behind a proxy was replaced
            await self._begin()
        if self._next is not None and number > self._next:
            await self._replay(self._next)
        self._apply(number, frames[-1])
        self._notify()

    def _apply(self, number: int, payload: bytes) -> None:
        """Apply a batch unless it was applied before. If batches before it were missed, clear the index first."""
        if self._next is not None and number < self._next:
            return
        if self._next is not None and number > self._next:
            self._warn(f"{number - self._next} batches of KV events were missed; what it holds is learnt anew")
            self._void()
        self._next = number + 1
        try:
            self._blocks.apply(msgspec.msgpack.decode(payload))
        except (msgspec.MsgspecError, ValueError) as error:
            self._warn(f"a batch of KV events cannot be read ({error}); what it holds is learnt anew")
            self._void()
        if self._blocks.other_block_size:
            self._warn(
                f"its blocks have {self._blocks.other_block_size} tokens, not those of replica.memory.block_size"
            )

    async def _replay(self, first: int) -> None:
        """Request the batches that the server keeps from number `first` on, and apply those received."""
        address = self._settings.replay_endpoint
        if address is None:
            return
        socket = self._socket(zmq.DEALER)
        try:
            socket.connect(address)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                frames = await asyncio.wait_for(socket.recv_multipart(), _REPLAY_S)
                if len(frames) < 2 or frames[-2] == _END:
                    return
                self._apply(int.from_bytes(frames[-2], "big"), frames[-1])
                await asyncio.sleep(0)  # let other coroutines run
        except TimeoutError:
            self._warn(f"its replay socket says nothing ({address})")
        finally:
            socket.close(linger=0)

    def _void(self) -> None:
        self._blocks.clear()
        self._is_new = True

    def _notify(self) -> None:
        stored, removed = self._blocks.news()
        if self._is_new:
            self._is_new = False
            self._report(self._blocks.content, begins=True)
        elif stored or removed:
            self._report(stored, removed)

    def _report(
        self, stored: Sequence[str] = (), removed: Sequence[str] = (), *, begins: bool = False, ends: bool = False
    ) -> None:
        self._on_report(CacheReport(0, *self._key, stored, removed, begins, ends))

    def _warn(self, message: str) -> None:
        """Log a warning, unless the same message was logged before."""
        kind = message.lstrip("0123456789")
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s: %s", self._name, message)


class KvFeeds:
    """Subscriptions to all servers that publish KV events."""

    def __init__(self) -> None:
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._ones: dict[tuple[str, int], Subscription] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(
        self,
        key: tuple[str, int],
        settings: KvEventsConfig,
        blocks: ServerBlocks,
        on_report: Callable[[CacheReport], None],
    ) -> None:
        """Follow the events of a server; `on_report` is called in the event loop's thread, with reports whose tick is
        0.
        """
        one = self._ones[key] = Subscription(self._context, key, settings, blocks, on_report)
        self._begin(one.run())

    def restart(self, key: tuple[str, int]) -> None:
        """Clear a server's index and apply the batches that the server keeps for replay.

        Called after the router has dropped the server's cached content. Does nothing for a server without events.
        """
        one = self._ones.get(key)
        if one is not None:
            self._begin(one.restart())

    def is_followed(self, key: tuple[str, int]) -> bool:
        """Return whether the index of a server is up to date with its events."""
        return key in self._ones and self._ones[key].is_following

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all subscriptions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)
