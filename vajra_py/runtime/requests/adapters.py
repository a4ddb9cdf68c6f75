"""LoRA adapters of one replica: the contents of its slots, and the requests that use them.

A request runs only while a slot holds its adapter. A load begins when a policy tries to admit a request whose adapter
is not loaded. The load takes a free slot or, if there is none, the slot of an idle adapter: of the least recently used
one, unless a policy chooses another. A loaded adapter stays until the request for which it was loaded is admitted or
leaves, so that two requests cannot take the slot from each other forever.

Source: vLLM 0.33: `max_loras`, and the skipping of requests whose adapter does not fit a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from vajra_py.contract import Refusal, RequestView
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.support.clock import to_ticks

_GONE = (RequestState.RUNNING, RequestState.HELD, RequestState.ENDED)
"""States in which a request no longer waits for the adapter that was loaded for it."""


class MergeRules(NamedTuple):
    """Rules for the duration of simulated steps with several adapters."""

    unmerged_factor: float
    """Factor by which the time of a step is multiplied if its requests use several adapters. It does not apply if they
    all use the same adapter, because that adapter's weights are merged into the model's.
    """
    switch_s: float
    """Additional time of a step that merges or unmerges weights, seconds."""


ChoosesVictim: TypeAlias = Callable[[Sequence[str], float], str]
"""Signature of `EvictsAdapters.evict_adapter`."""


class AdapterLoad(Struct, eq=False):
    """Adapter that is in a slot, or being loaded into it.

    Attributes:
        number: position among the loads of its replica, from 0.
        slot: the slot, from 0.
    """

    number: int
    name: str
    slot: int
    has_ended: bool = False


class Adapters:
    """The adapters of one replica."""

    def __init__(
        self,
        replica_id: int,
        max_loras: int,
        load_s: Mapping[str, float],
        num_blocks: Mapping[str, int] | None = None,
    ) -> None:
        """Create empty slots. `load_s`: seconds to load each adapter that the replica serves, by name. `num_blocks`:
        the adapters' sizes in KV blocks.
        """
        self.names = frozenset(load_s)
        self.num_blocks: Mapping[str, int] = num_blocks or {}
        self.chooses: ChoosesVictim | None = None
        """Method of the replica scheduler that chooses the idle adapter to evict; None: the least recently used one is
        evicted.
        """
        self.max_loras = max_loras
        self.loads: list[AdapterLoad] = []
        """Loads that have begun and that `take_loads` has not returned yet."""
        self.load_ticks = {name: to_ticks(seconds) for name, seconds in load_s.items()}
        """Duration of a load, in ticks, by the adapter's name."""
        self.merging: MergeRules | None = None
        """Rules by which several adapters add time to a simulated step; None: adapters add no time."""
        self._replica_id = replica_id
        self._is_timed = True
        self._num_loads = 0
        self._slots: dict[str, AdapterLoad] = {}
        """Loads whose adapters occupy a slot, by the adapter's name, the least recently used adapter first."""
        self._free = list(range(max_loras))
        self._users: dict[str, set[Request]] = {}
        self._awaiting: dict[str, Request] = {}
        """By adapter: the request for which it was loaded. Removed when a request first runs with the adapter."""

    def wait_for_loads(self) -> None:
        """Make every load last until `end_load`, regardless of its predicted time."""
        self._is_timed = False

    def serves(self, name: str) -> bool:
        """Return True if this adapter can be loaded."""
        return name in self.names

    def loaded(self) -> tuple[str, ...]:
        """Return the adapters that slots hold, the least recently used first."""
        return tuple(name for name, load in self._slots.items() if load.has_ended)

    def num_available(self) -> int:
        """Return the number of slots that are free or hold an idle adapter."""
        return self.max_loras - len(self._slots) + sum(map(self._is_idle, self._slots))

    def is_loading(self) -> bool:
        """Return True if an adapter is being loaded."""
        return not all(load.has_ended for load in self._slots.values())

    def fits(self, request: RequestView) -> bool:
        """Return True if a waiting request has no adapter, if its adapter is loaded, or if the load of its adapter can
        begin.
        """
        name = request.adapter
        if not name:
            return True
        load = self._slots.get(name)
        if load is not None:
            return load.has_ended
        return self.serves(name) and self.num_available() > 0

    def has_for(self, request: RequestView) -> bool:
        """Return True if a request can run immediately: it has no adapter, or a slot holds its adapter."""
        name = request.adapter
        return not name or (name in self._slots and self._slots[name].has_ended)

    def admit(self, request: Request, now: float) -> Refusal | None:
        """Return the reason why a request cannot run at `now`, or None if it can. Begins to load the request's adapter
        if it is neither loaded nor being loaded and a slot is available.
        """
        name = request.adapter
        load = self._slots.get(name)
        if load is None:
            if not self.fits(request):
                return Refusal.ADAPTER
            if len(self._slots) >= self.max_loras:
                victim = self._victim(request, now)
                heapq.heappush(self._free, self._slots.pop(victim).slot)
            load = AdapterLoad(self._num_loads, name, heapq.heappop(self._free))
            load.has_ended = self._is_timed and not self.load_ticks[name]
            self._num_loads += 1
            self._slots[name] = load
            self._awaiting[name] = request
            if not load.has_ended:
                self.loads.append(load)
        return None if load.has_ended else Refusal.LOADING

    def acquire(self, request: Request) -> None:
        """Note that a request begins to run with its adapter; does nothing for a request without one."""
        name = request.adapter
        if self.serves(name):
            self._users.setdefault(name, set()).add(request)
            self._awaiting.pop(name, None)
            self._slots[name] = self._slots.pop(name)

    def release(self, request: Request) -> None:
        """Note that a request has stopped running with its adapter; does nothing for a request without one."""
        users = self._users.get(request.adapter)
        if users is not None:
            users.discard(request)

    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads that have begun since the last call."""
        loads, self.loads = self.loads, []
        return loads

    def is_under_way(self, number: int) -> bool:
        """Return True if the load with this `number` has not ended and its slot has not been emptied meanwhile."""
        return any(load.number == number and not load.has_ended for load in self._slots.values())

    def end_load(self, number: int) -> None:
        """Note that an adapter has been loaded into its slot."""
        for load in self._slots.values():
            load.has_ended = load.has_ended or load.number == number

    def clear(self) -> None:
        """Empty all slots, because the replica has lost its memory."""
        self._slots.clear()
        self._free = list(range(self.max_loras))
        self._users.clear()
        self._awaiting.clear()
        self.loads = []

    def check(self) -> None:
        """Raise `RuntimeError` if a slot is lost or counted twice, or if an adapter that is not loaded is in use."""
        used = {name for name, users in self._users.items() if users}
        slots = sorted([*self._free, *(load.slot for load in self._slots.values())])
        if slots != list(range(self.max_loras)) or not used <= set(self.loaded()):
            raise RuntimeError(f"slots hold {list(self._slots)} of {self.max_loras}, and {sorted(used)} are in use")

    def _victim(self, request: Request, now: float) -> str:
        idle = [one for one in self._slots if self._is_idle(one)]
        if self.chooses is None:
            return idle[0]
        chosen = self.chooses(idle, now)
        if chosen not in idle:
            allowed = ", ".join(map(repr, idle))
            raise ValueError(
                f"request {request.request_id} cannot have the slot of adapter {chosen!r}. Allowed: {allowed}"
            )
        return chosen

    def _is_idle(self, name: str) -> bool:
        """Return True if an adapter is loaded, no request uses it, and the request for which it was loaded does not
        wait for it.
        """
        if not self._slots[name].has_ended or self._users.get(name):
            return False
        request = self._awaiting.get(name)
        return request is None or request.state in _GONE or request.replica_id != self._replica_id
