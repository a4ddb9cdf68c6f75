"""A running router: passes time and events of servers to the core, in the event loop's thread."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vajra_py.config import SystemConfig
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.engine.clock import WallClock
from vajra_py.errors import ConfigError, Problem
from vajra_py.experiment.runs.recording import RunRecording, SessionEnd
from vajra_py.plugins import Registry
from vajra_py.route.build import build_router, description, route_settings, servers_of
from vajra_py.route.client import ServerClient
from vajra_py.route.config import RouteConfig
from vajra_py.route.connections import ServerFault
from vajra_py.route.core import NEVER, RouteCore, Submitted
from vajra_py.route.kv_events import ServerBlocks
from vajra_py.route.records import PLACEMENTS_FILE, PlacementLog
from vajra_py.runtime.records.input_log import Arrival, CacheReport
from vajra_py.runtime.requests.request import Request, RequestFacts
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_seconds
from vajra_py.serve.http.options import is_key
from vajra_py.serve.session.output_streams import SHUTTING_DOWN, End
from vajra_py.serve.session.session import STOP_S, SessionState

if TYPE_CHECKING:  # `subscription` imports optional packages
    from vajra_py.route.subscription import KvFeeds

_log = logging.getLogger(__name__)
_MOST_SILENCES = 3
"""Number of consecutive unanswered polls of /metrics after which a server counts as down."""
_MOST_NAMES = 8
"""Number of entries per KV block for which the index of a server's KV events has room: a server may report one entry
for each group of layers.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Server selected for a request."""

    replicaset: str
    replica_id: int
    url: str
    leaves: bool
    """True if the server computes only the prompt."""

    def __str__(self) -> str:
        """Return the server's name for clients and records (as in the header `x-vajra-server`), without address."""
        return f"{self.replicaset}/{self.replica_id}"


@dataclass(eq=False, slots=True)
class Routed:
    """State of one client's request."""

    on_news: Callable[[], None]
    """Called after `place` has changed, and after the request has ended."""
    request: Request | None = None
    place: Place | None = None
    """Server to which the request is to be sent next; None once it is being sent."""
    end: End | None = None
    kv_params: Any = None
    """`kv_transfer_params` for the decode server."""
    is_sent: bool = False
    """True once the current server has accepted a connection for the request. If this server is lost later, sending
    the request to it counts as an attempt.
    """
    has_begun: bool = False
    """True once a server's answer is being sent to the client; the request then cannot be sent again."""
    server: _Server | None = None
    """Server that has the request now; None if there is none."""


@dataclass(eq=False, slots=True)
class _Server:
    key: tuple[str, int]
    url: str
    leaves: bool
    num_silences: int = 0
    """Number of consecutive failed polls of /metrics, without an answer to any other request in between."""
    has_answered: bool = False
    """True if the server answered any request since the last failed poll."""
    routed: dict[Routed, None] = field(default_factory=dict)


class RouteSession:
    """Session of a router: the core with its clock, servers and recording."""

    def __init__(self, config: SystemConfig, registry: Registry, save_run: Path | None = None) -> None:
        self.settings = settings = route_settings(config)
        self.config = config
        self._key = _key_of_servers(settings)
        controller = build_router(config, registry)
        self.controller = controller
        self.state = SessionState.LOADING
        self.error: BaseException | None = None
        self.is_left_behind = self.is_stuck = self.is_writing = False
        self._recording = None if save_run is None else RunRecording(config, registry, save_run)
        observers: list[Observer] = []
        self._placements: PlacementLog | None = None
        note = None
        if self._recording is not None and save_run is not None:
            self._recording.begin(description(controller), controller)
            self._placements = PlacementLog(save_run / PLACEMENTS_FILE)
            observers = [*self._recording.observers, self._placements]
            note = self._recording.note
        controller.watch(observers)
        salted = any(one.memory.tenant_salt for one in config.replica_settings)
        self.has_tenant_salt = salted
        self.core = core = RouteCore(controller, settings.max_tries, note, tenant_salt=salted)
        core.on_send, core.on_ended, core.on_taken_in = self._send, self._ended, self._submitted
        self._clock = WallClock()
        self._servers = {
            key: _Server(key, one.url, controller.replicasets[key[0]].replicas[key[1]].parts.role.value == "prefill")
            for key, one in servers_of(config).items()
        }
        self._make_kv_feeds = _kv_feeds(settings)
        self._kv_feeds: KvFeeds | None = None
        self._routed: dict[Request, Routed] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._down_since: dict[str, float] = {}
        self._ended_event: asyncio.Event | None = None
        self.client: ServerClient | None = None

    # Called by the HTTP server

    def start(self) -> None:
        """Start serving."""
        self._ended_event = asyncio.Event()
        self.client = ServerClient(self.settings, self._key)
        self.state = SessionState.READY
        for server in self._servers.values():
            self._tasks.append(asyncio.get_running_loop().create_task(self._watch(server)))
        if self._make_kv_feeds is not None:
            self._kv_feeds = self._make_kv_feeds()
            for key, one in servers_of(self.config).items():
                if one.kv_events is not None:
                    memory = self.controller.replicasets[key[0]].replicas[key[1]].memory
                    blocks = ServerBlocks(memory.block_size, _MOST_NAMES * memory.num_blocks)
                    self._kv_feeds.follow(key, one.kv_events, blocks, self._take_kv_report)

    async def ended(self) -> None:
        """Wait until the session has stopped serving."""
        assert self._ended_event is not None
        await self._ended_event.wait()

    def end_if_out_of_service(self) -> None:
        """Do nothing: the router keeps running, and /ready lists the replicasets that are out of service."""

    def drain(self) -> None:
        """Refuse new requests from now on."""
        if self.state is SessionState.READY:
            self.state = SessionState.DRAINING

    async def close(self, stop_s: float = STOP_S) -> None:
        """End the remaining requests, and finish the recording."""
        if self.state in (SessionState.CLOSED, SessionState.FAILED):
            return
        self.drain()
        for request in list(self._routed):
            self.core.advance(self._clock.now(), (Phase.ABORT, request.request_id))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._kv_feeds is not None:
            await self._kv_feeds.close()
        if self._timer is not None:
            self._timer.cancel()
        if self.client is not None:
            await self.client.close()
        if self._recording is not None:
            self.is_writing = True
            if self._placements is not None:
                self._placements.close()
            self._recording.finish(SessionEnd(self.controller, self.core.now, 0, ()), None)
            self.is_writing = False
        self.state = SessionState.CLOSED
        if self._ended_event is not None:
            self._ended_event.set()

    @property
    def num_up(self) -> int:
        """Number of servers in service."""
        return sum(one.num_up for one in self.controller.replicasets.values())

    def _can_serve(self, name: str) -> bool:
        """Return whether the replicaset has servers in service for both prompts and decodes."""
        replicaset = self.controller.replicasets[name]
        return replicaset.can_serve_with(
            one.replica_id for one in replicaset.replicas if replicaset.is_up(one.replica_id)
        )

    def unavailable(self) -> dict[str, str]:
        """Return the reason for each replicaset that accepts no requests."""
        found = {name: one.out_of_service for name, one in self.controller.replicasets.items() if one.out_of_service}
        for name in self.controller.replicasets:
            if not self._can_serve(name):
                found.setdefault(name, "no server is up that could take requests")
        return found

    @property
    def is_ready(self) -> bool:
        """True if new requests are accepted, and some replicaset can serve them now."""
        return self.state is SessionState.READY and len(self.unavailable()) < len(self.controller.replicasets)

    # Requests

    def submit(self, facts: RequestFacts, token_ids: tuple[int, ...], salt: str | None, routed: Routed) -> None:
        """Submit a request. If it is refused, `routed.end` is set at once."""
        now = max(self._clock.now(), self.core.now + 1000)
        arrival = Arrival(now, to_seconds(now), facts, None, token_ids, None, salt)
        self.core.advance(now, (Phase.ARRIVAL, Submitted(arrival, routed)))
        self._set_timer()

    def answer(self, routed: Routed, num_tokens: int, end: str = "", detail: str = "") -> None:
        """Pass the progress of a request at its server to the core."""
        if routed.request is not None and routed.end is None:
            if routed.server is not None and not detail:  # `detail` describes a fault
                routed.server.has_answered = True
            self.core.answer(self._clock.now(), routed.request, num_tokens, end, detail)
            self._set_timer()

    def hand_on(self) -> None:
        """Send requests with computed prompts on to their decode servers."""
        self.core.advance(self._clock.now())

    def abort(self, routed: Routed) -> None:
        """Abort a request whose client has left."""
        if routed.request is not None and routed.end is None:
            self.core.advance(self._clock.now(), (Phase.ABORT, routed.request.request_id))
            self._set_timer()

    def lose(self, place: Place, why: str) -> None:
        """Take a server out of service for the reason `why`.

        Its requests without output are placed again; the others fail.
        """
        replicaset = self.controller.replicasets[place.replicaset]
        if not replicaset.is_up(place.replica_id):
            return
        _log.warning("%s (%s) is down: %s", place, place.url, why)
        detail = f"server {place} is down: {why}"
        for routed in [one for one in self._servers[place.replicaset, place.replica_id].routed if one.has_begun]:
            if routed.request is not None:
                self.answer(routed, routed.request.num_output_tokens, EndReason.FAILED.value, detail)
        at_it = self._servers[place.replicaset, place.replica_id].routed
        sent = tuple(one.request.request_id for one in at_it if one.is_sent and one.request is not None)
        self.core.lose(self._clock.now(), place.replicaset, place.replica_id, detail, sent)
        self._set_timer()

    def _submitted(self, request: Request, payload: Any) -> None:
        payload.request = request
        self._routed[request] = payload

    def _send(self, request: Request, replicaset: str, replica_id: int) -> None:
        server = self._servers[replicaset, replica_id]
        routed = self._routed[request]
        self._forget(routed)
        server.routed[routed] = None
        routed.server, routed.is_sent = server, False
        routed.place = Place(replicaset, replica_id, server.url, server.leaves)
        routed.on_news()

    def _forget(self, routed: Routed) -> None:
        if routed.server is not None:
            del routed.server.routed[routed]
            routed.server = None

    def _ended(self, request: Request, reason: EndReason) -> None:
        if self._recording is not None:
            self._recording.ended(request, reason, ())
        routed = self._routed.pop(request, None)
        if routed is not None:
            self._forget(routed)
            retry = None if request.admission is None else request.admission.retry_after_s
            detail = request.detail
            if reason is EndReason.ABORTED and self.state is SessionState.DRAINING:
                reason, detail = EndReason.FAILED, SHUTTING_DOWN  # aborted by the drain, or by a client that is gone
            routed.end = End(reason, detail, retry_after_s=retry)
            routed.on_news()

    # Timer

    def _set_timer(self) -> None:
        """Set the timer to the next event that is due by the clock."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.core.next_due()
        if due < NEVER:
            left_s = max(0.0, to_seconds(due - self._clock.now()))
            self._timer = asyncio.get_running_loop().call_later(left_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self.core.next_due() <= self._clock.now():
            self.core.advance(self._clock.now())
        self._set_timer()

    # Servers

    async def _watch(self, server: _Server) -> None:
        """Poll a server periodically: its figures while it is up, its health while it is down."""
        assert self.client is not None
        loop, settings = asyncio.get_running_loop(), self.settings
        place = Place(*server.key, server.url, server.leaves)
        while True:
            replicaset = self.controller.replicasets[place.replicaset]
            if not replicaset.is_up(place.replica_id):
                self._abandon_after(place.replicaset, loop.time())
                if await self.client.is_healthy(server.url):
                    _log.info("%s is up again", server.url)
                    server.num_silences = 0
                    self._down_since.pop(place.replicaset, None)
                    self.core.restore(self._clock.now(), *server.key)
                    if self._kv_feeds is not None:
                        self._kv_feeds.restart(server.key)
                    self._set_timer()
                    continue
                await asyncio.sleep(settings.health_interval_s)
                continue
            if settings.metrics_interval_s is None:
                await asyncio.sleep(settings.health_interval_s)
                continue
            await self._look(server, place)
            await asyncio.sleep(settings.metrics_interval_s)

    async def _look(self, server: _Server, place: Place) -> None:
        assert self.client is not None
        try:
            figures = await self.client.figures(server.url)
        except ServerFault as fault:
            server.num_silences = 0 if server.has_answered else server.num_silences + 1
            server.has_answered = False
            if fault.is_down or server.num_silences >= _MOST_SILENCES:
                self.lose(place, str(fault))
            return
        server.num_silences = 0
        if figures is not None and self.controller.replicasets[place.replicaset].is_up(place.replica_id):
            report = (figures.num_running, figures.num_waiting, figures.kv_fraction)
            self.core.report(self._clock.now(), *server.key, report)
            self._set_timer()

    def _take_kv_report(self, report: CacheReport) -> None:
        self.core.report_kv(self._clock.now(), report)
        self._set_timer()

    def _abandon_after(self, replicaset: str, now: float) -> None:
        """End the waiting requests of a replicaset if it has been unable to serve for longer than `wait_s`."""
        if self._can_serve(replicaset):
            self._down_since.pop(replicaset, None)
            return
        since = self._down_since.setdefault(replicaset, now)
        if now - since > self.settings.wait_s and self.controller.num_alive:
            self.core.abandon(
                self._clock.now(),
                replicaset,
                f"no server that could go on with it was up for {self.settings.wait_s:g} s",
            )
            self._set_timer()

    def status(self) -> Mapping[str, Any]:
        """Return state and load of every server, by name."""
        found = {}
        for (name, replica_id), server in self._servers.items():
            load = self.controller.replicasets[name].live_loads()[replica_id]
            found[f"{name}/{replica_id}"] = {
                "url": server.url,
                "pool": load.pool,
                "state": load.state.value,
                "num_running": load.num_running,
                "num_waiting": load.num_waiting,
                "free_blocks": load.free_blocks,
            }
            if self._kv_feeds is not None:
                found[f"{name}/{replica_id}"]["kv_events"] = self._kv_feeds.is_followed((name, replica_id))
        return found


def _key_of_servers(settings: RouteConfig) -> str | None:
    """Return the servers' API key; None if the clients' keys are passed on. Raises `ConfigError`."""
    variable = settings.api_key_variable
    if variable is None:
        return None
    key = os.environ.get(variable)
    if key and is_key(key):
        return key
    message, allowed = f"the variable {variable!r} is not set", "A variable with the servers' key"
    if key:
        message = f"the variable {variable!r} has characters that a header cannot carry"
        allowed = "Allowed: visible ASCII"
    raise ConfigError(Problem("backend.route.api_key_variable", message, allowed))


def _kv_feeds(settings: RouteConfig) -> type[KvFeeds] | None:
    """Return the class of subscriptions to KV events; None if no server publishes any.

    Raises `ConfigError` if the packages that subscriptions need are not installed.
    """
    if not settings.follows_kv_events:
        return None
    try:
        from vajra_py.route.subscription import KvFeeds
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "vajra_py":
            raise
        message = f"the packages for them are not installed ({error.name})"
        allowed = 'Install the extra: pip install "vajra-py[kv-events]"'
        raise ConfigError(Problem("backend.route.servers.kv_events", message, allowed)) from None
    return KvFeeds


__all__ = ["Place", "RouteSession", "Routed"]
