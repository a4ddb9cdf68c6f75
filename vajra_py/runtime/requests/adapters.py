"""LoRA adapters of one replica: which of them its slots hold, and who uses them.

A request runs only while a slot holds its adapter. A load begins when a policy tries to admit a request whose adapter is not here: into
a free slot, else into that of the least recently used adapter that nobody uses. Until the request is admitted or leaves, its adapter
stays, so that two requests cannot take the slot from each other for ever.

Source: vLLM 0.33: `max_loras`, and the skipping of requests whose adapter does not fit a step.
"""

from __future__ import annotations

from collections.abc import Mapping

from vajra_py.contract import Refusal, RequestView
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.support.clock import to_seconds, to_ticks

_GONE = (RequestState.RUNNING, RequestState.HELD, RequestState.ENDED)
"""States of requests that do not wait for an adapter."""


class Adapters:
    """The adapters of one replica."""

    def __init__(self, replica_id: int, max_loras: int, load_s: Mapping[str, float]) -> None:
        """`load_s`: time to load each adapter that the replica serves, seconds, by name."""
        self.names = frozenset(load_s)
        self.max_loras = max_loras
        self.loads: list[int] = []
        """Ticks at which loads end that have begun and that nobody was told of yet."""
        self._replica_id = replica_id
        self._load_ticks = {name: to_ticks(seconds) for name, seconds in load_s.items()}
        self._slots: dict[str, float] = {}
        """When each adapter is loaded, seconds, the least recently used first."""
        self._users: dict[str, set[Request]] = {}
        self._awaiting: dict[str, Request] = {}
        """Requests for which adapters were loaded that nobody has used since."""

    def serves(self, name: str) -> bool:
        """Return True if this adapter can be loaded."""
        return name in self.names

    def loaded(self, now: float) -> tuple[str, ...]:
        """Return the adapters that slots hold now, the least recently used first."""
        return tuple(name for name, ready_at in self._slots.items() if ready_at <= now)

    def num_available(self, now: float) -> int:
        """Return the number of slots into which another adapter could be loaded now."""
        return self.max_loras - len(self._slots) + sum(self._is_idle(name, now) for name in self._slots)

    def is_loading(self, now: float) -> bool:
        """Return True if an adapter is on its way to its slot."""
        return any(ready_at > now for ready_at in self._slots.values())

    def fits(self, request: RequestView, now: float) -> bool:
        """Return True if a waiting request can run, or its adapter be loaded, now."""
        name = request.adapter
        if not name:
            return True
        ready_at = self._slots.get(name)
        if ready_at is not None:
            return ready_at <= now
        return self.serves(name) and self.num_available(now) > 0

    def admit(self, request: Request, now: float) -> Refusal | None:
        """Return the reason that a request cannot run now; its adapter's load begins where a slot can be had."""
        name = request.adapter
        ready_at = self._slots.get(name)
        if ready_at is None:
            if not self.fits(request, now):
                return Refusal.ADAPTER
            if len(self._slots) >= self.max_loras:
                del self._slots[next(one for one in self._slots if self._is_idle(one, now))]
            ends_at = to_ticks(now) + self._load_ticks[name]
            ready_at = self._slots[name] = to_seconds(ends_at) if self._load_ticks[name] else now
            self._awaiting[name] = request
            if ready_at > now:
                self.loads.append(ends_at)
        return Refusal.LOADING if ready_at > now else None

    def acquire(self, request: Request) -> None:
        """A request that has one begins to run with its adapter."""
        name = request.adapter
        if self.serves(name):
            self._users.setdefault(name, set()).add(request)
            self._awaiting.pop(name, None)
            self._slots[name] = self._slots.pop(name)

    def release(self, request: Request) -> None:
        """A request runs no longer; nothing happens to one that has no adapter."""
        users = self._users.get(request.adapter)
        if users is not None:
            users.discard(request)

    def take_loads(self) -> list[int]:
        """Return the ticks at which loads end that have begun since this was last called."""
        loads, self.loads = self.loads, []
        return loads

    def clear(self) -> None:
        """Forget everything: the replica is empty."""
        self._slots.clear()
        self._users.clear()
        self._awaiting.clear()
        self.loads = []

    def check(self, now: float) -> None:
        """Raise `RuntimeError` if there are more adapters than slots, or one is in use that is not loaded."""
        used = {name for name, users in self._users.items() if users}
        if len(self._slots) > self.max_loras or not used <= set(self.loaded(now)):
            raise RuntimeError(f"slots hold {list(self._slots)} of {self.max_loras}, and {sorted(used)} are in use")

    def _is_idle(self, name: str, now: float) -> bool:
        """Return True if nobody uses an adapter that is loaded, or waits for it alone."""
        if self._slots[name] > now or self._users.get(name):
            return False
        request = self._awaiting.get(name)
        return request is None or request.state in _GONE or request.replica_id != self._replica_id
