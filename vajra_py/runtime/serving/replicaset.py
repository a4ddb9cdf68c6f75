"""A replicaset: bounds admission and binds requests to replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import cast

from vajra_py.contract import (
    Layer,
    QueueView,
    RefusesRequests,
    ReplicaLimits,
    ReplicaLoadView,
    ReplicasetScheduler,
    ReplicaState,
    RequestView,
)
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.errors import POLICY_EXCEPTIONS, ConfigError, PolicyError, Problem, VajraError, place_of_definition
from vajra_py.runtime.queues import RequestQueue
from vajra_py.runtime.queues.shared import SharedAccess
from vajra_py.runtime.requests.lifecycle import end_request
from vajra_py.runtime.requests.listeners import NOBODY
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.eligibility import RequestBounds, first_refusal, refusal_of
from vajra_py.runtime.serving.load import LiveLoad, LiveLoads, LoadOnDemand, SnapshotLoad
from vajra_py.runtime.serving.policy_binding import Policies
from vajra_py.runtime.serving.replica import Around, Replica
from vajra_py.runtime.support.clock import to_seconds

QUEUE_FULL = "the queue is full"
ALL_FAILED = "every replica has failed"
"""How refusals begin that have nothing to do with the request itself."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How much may wait in a replicaset; None: any amount."""

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


class SharedDoor:
    """One replica's access to the shared queue: it sees what the replicaset scheduler lets it pull."""

    __slots__ = ("_replicaset", "queue", "view")

    def __init__(self, replicaset: Replicaset) -> None:
        self._replicaset = replicaset
        self.queue = replicaset.shared
        self.view: ReplicaLoadView | None = None

    def __len__(self) -> int:
        return self.queue.num_requests

    def __contains__(self, request: object) -> bool:
        return request in self.queue

    def pulled(self, now: float) -> Iterator[RequestView]:
        """What this replica may take now, in the order that the scheduler gives."""
        assert self.view is not None
        return self._replicaset.pulled_by(self.view, now)

    def begin_step(self) -> None:
        """Keys that may move with anything are read again."""
        self.queue.begin_step()

    def take(self, request: RequestView) -> None:
        """The replica has admitted it."""
        self.queue.remove(request)


class _SharedView:
    """`QueueView` over the shared queue at one moment."""

    __slots__ = ("_now", "_queue")

    def __init__(self, queue: RequestQueue, now: float) -> None:
        self._queue = queue
        self._now = now

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[RequestView]:
        return self._queue.ordered(self._now)


class _EligibleView:
    """`QueueView` over those requests of the shared queue that one replica can run, where replicas differ."""

    __slots__ = ("_is_eligible", "_now", "_queue")

    def __init__(self, queue: RequestQueue, now: float, is_eligible: Callable[[RequestView], bool]) -> None:
        self._queue = queue
        self._now = now
        self._is_eligible = is_eligible

    def __len__(self) -> int:
        return sum(map(self._is_eligible, self._queue))

    def __iter__(self) -> Iterator[RequestView]:
        return filter(self._is_eligible, self._queue.ordered(self._now))


class Replicaset:
    """Replicas of one model behind one prioritizer and one replicaset scheduler."""

    def __init__(
        self,
        name: str,
        scheduler: ReplicasetScheduler,
        scheduler_name: str,
        shared: RequestQueue,
        admission: AdmissionLimits,
        view_interval_s: float = 0.0,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.scheduler_name = scheduler_name
        self.shared = shared
        self.admission = admission
        self.replicas: list[Replica] = []
        self._doors: list[SharedDoor] = []
        self.observers: Sequence[Observer] = ()
        self.listeners = NOBODY
        self._view_interval_s = view_interval_s
        self._live = LiveLoads()
        self._views: LiveLoads | list[SnapshotLoad] = self._live
        self._queued_by_id: dict[str, Request] = {}
        self.may_refuse = False
        """Whether its replica schedulers are asked before a request is taken in."""
        self._differs = False
        """Whether a request that one replica can run may be too much for another."""
        self._eligible: dict[Request, Sequence[Replica]] = {}
        """Replicas that can run a request, where they differ."""
        self.sync: Callable[[], None] = _do_nothing
        """Applies every step that has ended; see `load_of`. The driver's, where its backend fast-forwards."""
        self.lost: set[int] = set()
        """Replicas that do not compute."""
        self.around: Around | None = None
        self.policies: Policies | None = None
        """Where its policies come from; None: it was put together by hand, and they stay."""
        self.out_of_service = ""
        """What a policy did for which this replicaset takes no requests; empty: nothing."""
        self.bind_policy(scheduler, scheduler_name)

    def add_replica(self, make: Callable[[SharedAccess], Replica]) -> Replica:
        """Build a replica with its door to the shared queue and take it in."""
        door = SharedDoor(self)
        self._doors.append(door)
        replica = make(door)
        load = LiveLoad(replica)
        door.view = load
        self.replicas.append(replica)
        self.bounds = RequestBounds(self.name, self.replicas)
        self.on_schedulers_bound()
        self._live.append(load)
        self._views = [SnapshotLoad.of(one) for one in self._live] if self._view_interval_s > 0 else self._live
        return replica

    def share(self, queue: RequestQueue) -> None:
        """Let this be the shared queue from now on."""
        self.shared = queue
        for door in self._doors:
            door.queue = queue

    def bind_policy(self, scheduler: ReplicasetScheduler, name: str) -> None:
        """Let this scheduler choose from now on."""
        self.scheduler, self.scheduler_name = scheduler, name
        assign, around = scheduler.assign, self.around
        self._assign_call = assign if around is None else around(self.name, Layer.REPLICASET_SCHEDULER, name, assign)

    def on_schedulers_bound(self) -> None:
        """Read from the replicas' schedulers, which are in force now, which of them are asked about arriving requests."""
        self.may_refuse = any(isinstance(one.parts.policy, RefusesRequests) for one in self.replicas)
        self._differs = not self.bounds.are_equal or (self.may_refuse and not self._are_schedulers_alike())
        self._eligible.clear()

    def _are_schedulers_alike(self) -> bool:
        if self.policies is not None:
            return self.policies.are_schedulers_alike
        return len({type(one.parts.policy) for one in self.replicas}) == 1

    @property
    def limits_in_common(self) -> ReplicaLimits:
        """Limits of every replica. Raises `ConfigError` where they differ."""
        if not self.bounds.are_equal:
            found = ", ".join(f"{one.replica_id}: {one.limits}" for one in self.replicas)
            problem = Problem(f"replicasets.{self.name}", f"its replicas have different limits ({found})")
            raise ConfigError(problem)
        return self.bounds.largest

    def eligible(self, request: Request, now: float) -> Sequence[Replica]:
        """Replicas, up or not, that have room for a request and whose scheduler does not refuse it, by id."""
        if not self._differs:
            return self.replicas
        found = self._eligible.get(request)
        if found is None:
            found = [
                one
                for one in self.bounds.holders(request)
                if refusal_of(one.parts.policy, one.parts.policy_name, self.load_of(one.replica_id), request, now)
                is None
            ]
            self._eligible[request] = found
        return found

    def call_through(self, around: Around) -> None:
        """Let policies be asked through what `around` makes of their methods, those that are there and those to come."""
        self.around = around
        self.bind_policy(self.scheduler, self.scheduler_name)
        for replica in self.replicas:
            replica.around = around
            replica.bind_policy(replica.parts)

    def watch(self, observers: Sequence[Observer]) -> None:
        """Let these observers see everything that happens here from now on."""
        self.observers = observers
        for replica in self.replicas:
            replica.watch(observers)

    def set_state(self, replica_id: int, state: ReplicaState) -> None:
        """A replica comes or goes; the scheduler sees it at its next look."""
        self._live[replica_id].set_state(state)

    def is_up(self, replica_id: int) -> bool:
        """Whether a replica takes requests."""
        return self._live[replica_id].is_up

    def lose(self, replica_id: int, detail: str, now: float) -> list[tuple[Request, EndReason]]:
        """A replica is gone with everything that it held; returns the requests that ended with it."""
        self.note_lost(replica_id)
        ended = self.replicas[replica_id].lose(detail, now)
        for request in self._stranded(now):
            self.shared.remove(request)
            end_request(request, EndReason.FAILED, detail, now)
            for observer in self.observers:
                observer.on_ended(request, EndReason.FAILED, detail, now)
            ended.append((request, EndReason.FAILED))
        return ended

    def _stranded(self, now: float) -> list[Request]:
        """Requests of the shared queue that no replica that is up can run, most urgent first."""
        if not self._all_lost and not self._differs:
            return []
        queued = [cast(Request, one) for one in self.shared.ordered(now)]
        return queued if self._all_lost else [one for one in queued if not self._is_runnable(one, now)]

    def _is_runnable(self, request: Request, now: float) -> bool:
        return any(self.is_up(one.replica_id) for one in self.eligible(request, now))

    def note_lost(self, replica_id: int) -> None:
        """A replica does not compute any more."""
        self.set_state(replica_id, ReplicaState.DOWN)
        self.lost.add(replica_id)

    def restore(self, replica_id: int) -> None:
        """A lost replica is there again, empty."""
        self.lost.discard(replica_id)
        self.set_state(replica_id, ReplicaState.UP)

    @property
    def num_up(self) -> int:
        """Replicas that compute."""
        return len(self.replicas) - len(self.lost)

    @property
    def _all_lost(self) -> bool:
        return len(self.lost) == len(self.replicas)

    # The door

    def refusal(self, request: Request, now: float) -> str | None:
        """Why this request cannot be taken, now or ever; None when it can."""
        bounds = self.bounds
        prompt = request.num_prompt_tokens
        if self.out_of_service:
            return self.out_of_service
        if self._all_lost:
            return f"{ALL_FAILED} (all {len(self.replicas)})"
        if request.max_tokens < 1:
            return (
                f"the prompt ({prompt} tokens) leaves no room for output: a request may hold at most "
                f"{bounds.max_request_tokens} tokens here"
            )
        holders = bounds.holders(request)
        if not holders:
            return (
                f"prompt and output ({prompt} + {request.max_tokens} tokens) can never fit into the KV memory of a "
                f"replica ({bounds.largest.num_blocks} blocks of {bounds.block_size} tokens)"
            )
        if self._differs and not any(self.is_up(one.replica_id) for one in holders):
            return f"{ALL_FAILED} that has room for it ({len(holders)} of {len(self.replicas)})"
        detail = self._refused_by_policy(holders, request, now)
        if detail is not None:
            return detail
        waiting = self.admission.max_queued_requests
        if waiting is not None and self.num_queued >= waiting:
            return f"{QUEUE_FULL} ({self.num_queued} requests wait, at most {waiting} may)"
        tokens = self.admission.max_queued_tokens
        if tokens is not None and self.num_queued_tokens + prompt > tokens:
            return f"{QUEUE_FULL} ({self.num_queued_tokens} tokens wait, at most {tokens} may)"
        return None

    def _refused_by_policy(self, holders: Sequence[Replica], request: Request, now: float) -> str | None:
        if not self.may_refuse:
            return None
        return first_refusal((one for one in holders if self.is_up(one.replica_id)), self.load_of, request, now)

    def load_of(self, replica_id: int) -> ReplicaLoadView:
        """A replica for a policy that is asked whether it refuses a request, synchronised when a figure is read.

        Such a policy is asked at every arrival and seldom reads one: to synchronise before asking takes a tenth longer (the
        Azure conversation trace under `vllm_v1`), where every other policy declares whether it looks at loads.
        """
        return cast(ReplicaLoadView, LoadOnDemand(self._live[replica_id], self.sync))

    @property
    def num_queued(self) -> int:
        """Requests that wait, in the shared queue and the replicas' own."""
        return len(self.shared) + sum(len(replica.queue) for replica in self.replicas)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that wait to be computed."""
        return self.shared.num_tokens + sum(replica.queue.num_tokens for replica in self.replicas)

    def accept(self, request: Request, now: int) -> Replica | None:
        """Queue an accepted request; returns the replica that it is bound to, None when anyone may pull it."""
        request.move_to(RequestState.WAITING)
        return self.place(request, now)

    def place(self, request: Request, now: int) -> Replica | None:
        """Queue a request that is in no queue; returns like `accept`."""
        seconds = to_seconds(now)
        replica_id = self._assign(request, seconds) if self._may_assign(request, seconds) else None
        for observer in self.observers:
            observer.on_assigned(request, replica_id, seconds)
        return self.bind(request, replica_id, seconds)

    def bind(self, request: Request, replica_id: int | None, now: float) -> Replica | None:
        """Put a request into a replica's queue, or into the shared one (None)."""
        if replica_id is None:
            self.shared.add(request, now)
            self._queued_by_id[request.request_id] = request
            return None
        replica = self.replicas[replica_id]
        replica.enqueue(request, now)
        return replica

    def _may_assign(self, request: Request, now: float) -> bool:
        """Whether some replica is up that can run the request; otherwise it waits in the shared queue for one."""
        return self._is_runnable(request, now) if self._differs else self.num_up > 0

    def _assign(self, request: Request, now: float) -> int | None:
        views: Sequence[ReplicaLoadView] = self._views
        if self._view_interval_s > 0:
            views = [one.look(now, self._view_interval_s) for one in self._views if isinstance(one, SnapshotLoad)]
        if self._differs:
            views = [views[one.replica_id] for one in self.eligible(request, now)]
        try:
            chosen = self._assign_call(request, views, now)
        except VajraError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise PolicyError.caused_by(self.scheduler_name, error, request_id=request.request_id) from error
        if chosen is None:
            return None
        if type(chosen) is int and 0 <= chosen < len(self.replicas) and self._live[chosen].is_up and not self._differs:
            return chosen
        answer: object = chosen  # a plug-in may say anything
        up = [one.replica_id for one in self.eligible(request, now) if self.is_up(one.replica_id)]
        if not isinstance(answer, Integral) or int(answer) not in up:
            which = "that are up and can run it" if self._differs else "that are up"
            message = f"assigned a request to replica {chosen!r}. Replicas {which}: {up}"
            place = place_of_definition(self.scheduler.assign)
            raise PolicyError(self.scheduler_name, message, request_id=request.request_id, place=place)
        return int(chosen)

    def pulled_by(self, view: ReplicaLoadView, now: float) -> Iterator[RequestView]:
        """Shared-queue requests that the scheduler lets this replica take, as requests."""
        replica_id = view.replica_id
        try:
            for request_id in self.scheduler.pull(view, self._shared_view(replica_id, now), now):
                request = self._queued_by_id.get(request_id)
                if request is None or request not in self.shared:
                    message = "pulled a request that is not in the shared queue"
                    place = place_of_definition(self.scheduler.pull)
                    raise PolicyError(self.scheduler_name, message, request_id=request_id, place=place)
                if not self._differs or self._can_run(replica_id, request, now):
                    yield request
        except VajraError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise PolicyError.caused_by(self.scheduler_name, error) from error

    def _shared_view(self, replica_id: int, now: float) -> QueueView:
        if not self._differs:
            return _SharedView(self.shared, now)
        return _EligibleView(self.shared, now, lambda request: self._can_run(replica_id, cast(Request, request), now))

    def _can_run(self, replica_id: int, request: Request, now: float) -> bool:
        return any(one.replica_id == replica_id for one in self.eligible(request, now))

    def offers(self, replica_id: int, now: int) -> bool:
        """Whether the replica may pull anything from the shared queue."""
        return next(self.pulled_by(self._live[replica_id], to_seconds(now)), None) is not None

    def forget(self, request: Request) -> None:
        """The request has left for good."""
        self._queued_by_id.pop(request.request_id, None)
        self._eligible.pop(request, None)

    def abort(self, request: Request, reason: EndReason, now: float, detail: str = "") -> bool:
        """End a request before its time, wherever it is; False when its step has to come back first."""
        if request in self.shared:
            self.shared.remove(request)
            end_request(request, reason, detail, now)
            for observer in self.observers:
                observer.on_ended(request, reason, detail, now)
            return True
        return self.replicas[request.replica_id].abort(request, reason, now, detail)


def _do_nothing() -> None:
    """No step has ended that is not applied."""
