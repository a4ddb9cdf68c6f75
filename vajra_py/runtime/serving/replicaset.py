"""A replicaset, which limits its queues and binds requests to replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from vajra_py.contract import (
    Layer,
    Move,
    MovesRequests,
    PlacesAfterPrompt,
    PoolRole,
    QueueView,
    RefusesRequests,
    ReplicaLoadView,
    ReplicasetScheduler,
    ReplicaState,
    RequestView,
)
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.errors import POLICY_EXCEPTIONS, PolicyError, VajraError, place_of_definition
from vajra_py.runtime.kv import KvMemory
from vajra_py.runtime.movement.rules import HandOffRules
from vajra_py.runtime.movement.swap_rules import SwapRules
from vajra_py.runtime.movement.tier_rules import TierMovesRules
from vajra_py.runtime.queues import NoHits, RequestQueue
from vajra_py.runtime.queues.shared import SharedAccess
from vajra_py.runtime.requests.lifecycle import end_request
from vajra_py.runtime.requests.listeners import NOBODY
from vajra_py.runtime.requests.rejections import ALL_FAILED, QUEUE_FULL
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.content_feed import ContentFeed
from vajra_py.runtime.serving.eligibility import (
    AdmissionLimits,
    Holders,
    RequestBounds,
    Serving,
    first_refusal,
    have_both_roles,
    refusal_of,
)
from vajra_py.runtime.serving.load import LiveLoad, LiveLoads, LoadOnDemand, ReplicaViews
from vajra_py.runtime.serving.policy_binding import Policies
from vajra_py.runtime.serving.replica import Around, Replica
from vajra_py.runtime.serving.scaling import ReplicasetScaling
from vajra_py.runtime.serving.shared_queue import EligibleView, SharedQueueAccess, SharedView
from vajra_py.runtime.support.clock import to_seconds


class Replicaset:
    """Replicas of one model behind one prioritizer and one replicaset scheduler."""

    __slots__ = (  # CPython reads the attributes of an object slowly if its `__dict__` has more than 30 entries
        "_assign_call",
        "_differs",
        "_eligible",
        "_failed_at",
        "_live",
        "_place",
        "_queued_by_id",
        "_serving",
        "_shared_accesses",
        "_views",
        "admission",
        "around",
        "away",
        "bounds",
        "feed",
        "hand_off",
        "hand_off_watchers",
        "held_back",
        "kv_event_lag_s",
        "listeners",
        "lost",
        "may_refuse",
        "name",
        "newly_held_back",
        "observers",
        "out_of_service",
        "places_itself",
        "policies",
        "replicas",
        "scaling",
        "scheduler",
        "scheduler_name",
        "shared",
        "swaps",
        "sync",
        "tiers",
    )

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
        shared.use_hits(NoHits())
        self.admission = admission
        self.replicas: list[Replica] = []
        self._shared_accesses: list[SharedQueueAccess] = []
        self.observers: Sequence[Observer] = ()
        self.hand_off_watchers: Sequence[Observer] = ()
        """Observers that implement callbacks for hand-offs."""
        self.listeners = NOBODY
        self.kv_event_lag_s = 0.0
        """Seconds after which policies are notified of a change in a replica's cache."""
        self.feed: ContentFeed | None = None
        """Delivery of events about the content of caches; None if it is not needed."""
        self._live = LiveLoads()
        self._views = ReplicaViews(self._live, view_interval_s)
        self._queued_by_id: dict[str, Request] = {}
        self.may_refuse = False
        """True if some replica scheduler may refuse requests and is called before a request is accepted."""
        self._differs = False
        """True if replicas differ in the requests that they can take, because of different limits, roles, adapters, or
        replica schedulers that may refuse requests.
        """
        self._eligible: dict[Request, Sequence[Replica]] = {}
        """Replicas that can run a request, by request; used if replicas differ and schedulers may refuse requests."""
        self._failed_at: dict[Request, set[int]] = {}
        """Ids of the replicas on which a request failed, for requests that are placed again; see `avoid`."""
        self._serving: dict[Holders, Serving] = {}
        """Replicas that take requests, by the `Holders` of a request; cleared when a replica's state changes."""
        self.sync: Callable[[], None] = _do_nothing
        """Function that applies every ended step (see `load_of`); set by the driver if its backend fast-forwards."""
        self.lost: set[int] = set()
        """Ids of lost replicas."""
        self.away: set[int] = set()
        """Ids of replicas that take no requests because of a scaler: they start, drain, or are down."""
        self.scaling: ReplicasetScaling | None = None
        """Scaler with its present targets; None without a scaler."""
        self.around: Around | None = None
        self.policies: Policies | None = None
        """Present policies; None if the replicaset was assembled manually, so that its policies cannot be replaced."""
        self.hand_off: HandOffRules | None = None
        """Rules for moving requests with their KV; None if requests do not move."""
        self.tiers: TierMovesRules | None = None
        """Links and rules of the memory tiers below the replicas' devices; None if there are no tiers."""
        self.swaps: Sequence[SwapRules | None] = ()
        """Rules of each replica for swaps while steps run (None: the replica swaps between steps); empty if no replica
        has such rules.
        """
        self.held_back: dict[Request, None] = {}
        """Requests that are bound to a prefill replica, but are queued only when a decode replica has blocks for them;
        in order of binding.
        """
        self.newly_held_back: list[Request] = []
        """Requests held back for which no target has been sought yet."""
        self.out_of_service = ""
        """Text of the policy error that took this replicaset out of service; empty if the replicaset is in service."""
        self.bind_policy(scheduler, scheduler_name)

    def add_replicas(
        self,
        makes: Iterable[Callable[[SharedAccess], Replica]],
        make_load: Callable[[Replica], LiveLoad] = LiveLoad,
    ) -> None:
        """Build replicas, each with its access to the shared queue, and add them; `make_load` creates a replica's load
        view for policies.

        Raises `ConfigError` if the replicas have different block sizes.
        """
        for make in makes:
            access = SharedQueueAccess(self)
            self._shared_accesses.append(access)
            replica = make(access)
            access.view = load = make_load(replica)
            self.replicas.append(replica)
            replica.hands_off = self._hands_off(replica)
            self._live.add(load)
        self.bounds = RequestBounds(self.name, self.replicas)
        self.on_schedulers_bound()
        self._serving.clear()
        self._views = ReplicaViews(self._live, self._views.interval_s)

    def bind_content(self) -> None:
        """From now on, deliver events about the content of caches to policies that listen to them and, if
        `kv_event_lag_s` is not 0, to the load views.
        """
        if self.feed is None and (self.kv_event_lag_s > 0 or self.listeners.listen_to_content):
            self.feed = ContentFeed(self.replicas, self.kv_event_lag_s)
            for load in self._live:
                load.feed = self.feed if self.kv_event_lag_s > 0 else None
        if self.feed is not None:
            self.feed.bind(self.listeners)

    def share(self, queue: RequestQueue) -> None:
        """Replace the shared queue; its requests have no prefix hits, because they are bound to no replica."""
        self.shared = queue
        queue.use_hits(NoHits())
        for replica_id in range(len(self._shared_accesses)):
            self._set_access(replica_id)

    def _set_access(self, replica_id: int) -> None:
        """Give a replica access to the shared queue, or to an empty queue while it drains."""
        is_draining = self._live[replica_id].state is ReplicaState.DRAINING and self.policies is not None
        queue = self.policies.new_queue() if is_draining and self.policies is not None else self.shared
        self._shared_accesses[replica_id].queue = queue

    def bind_policy(self, scheduler: ReplicasetScheduler, name: str) -> None:
        """Replace the replicaset scheduler."""
        self.scheduler, self.scheduler_name = scheduler, name
        assign, around = scheduler.assign, self.around
        layer = Layer.REPLICASET_SCHEDULER
        self._assign_call = assign if around is None else around(self.name, layer, name, assign)
        self.places_itself = isinstance(scheduler, PlacesAfterPrompt)
        """True if the scheduler chooses among the replicas of all pools for a prompt, and chooses again when the prompt
        is computed.
        """
        if isinstance(scheduler, PlacesAfterPrompt):
            place: Callable[..., Any] = scheduler.place_after_prompt
        else:
            second = None if self.policies is None else self.policies.decode_scheduler
            place = assign if second is None else second.assign
        self._place = place, place if around is None else around(self.name, layer, name, place)
        """(Method that places requests after their prompts, function to call: this method or its wrapper)."""
        for replica in self.replicas:
            replica.hands_off = self._hands_off(replica)
        self._eligible.clear()

    def _hands_off(self, replica: Replica) -> bool:
        """Return True if requests leave a replica, or may leave it, when their prompt is computed."""
        role = replica.parts.role
        return role is PoolRole.PREFILL or (self.places_itself and role is not PoolRole.DECODE)

    def on_schedulers_bound(self) -> None:
        """Determine again which checks arriving requests need, because replica schedulers were bound."""
        self.may_refuse = any(isinstance(one.parts.policy, RefusesRequests) for one in self.replicas)
        self._differs = (
            not self.bounds.are_equal or self.bounds.is_split or (self.may_refuse and not self._are_schedulers_alike())
        )
        self._eligible.clear()

    def _are_schedulers_alike(self) -> bool:
        if self.policies is not None:
            return self.policies.are_schedulers_alike
        return len({type(one.parts.policy) for one in self.replicas}) == 1

    @property
    def moves_requests(self) -> bool:
        """True if the scheduler moves requests between replicas."""
        return isinstance(self.scheduler, MovesRequests)

    def eligible(self, request: Request, now: float) -> Sequence[Replica]:
        """Return the replicas, in order of id, that can hold a request and whose scheduler does not refuse it, whether
        they are up or not.
        """
        if not self._differs:
            return self.replicas
        holders = self.bounds.holders(request)
        able = holders.all if self.places_itself else holders.of_prompts
        if not self.may_refuse:
            return able
        found = self._eligible.get(request)
        if found is None:
            found = tuple(one for one in able if self._refusal_by(one, request, now) is None)
            self._eligible[request] = found
        return found

    def _refusal_by(self, replica: Replica, request: Request, now: float) -> str | None:
        parts = replica.parts
        return refusal_of(parts.policy, parts.policy_name, self.load_of(replica.replica_id), request, now)

    def call_through(self, around: Around) -> None:
        """Call the methods of present and later policies through the wrappers that `around` returns for them."""
        self.around = around
        self.bind_policy(self.scheduler, self.scheduler_name)
        for replica in self.replicas:
            replica.around = around
            replica.bind_policy(replica.parts)

    def watch(self, observers: Sequence[Observer]) -> None:
        """Notify these observers of all events of this replicaset from now on."""
        self.observers = observers
        self.hand_off_watchers = [one for one in observers if _notes_hand_offs(one)]
        for replica in self.replicas:
            replica.watch(observers)

    def set_state(self, replica_id: int, state: ReplicaState) -> None:
        """Set a replica's state; the scheduler gets the new state from its next call on."""
        self._live[replica_id].set_state(state)
        self._serving.clear()

    def scale(self, replica_id: int, state: ReplicaState) -> None:
        """Set the state of a replica that a scaler starts or stops."""
        self.set_state(replica_id, state)
        self._set_access(replica_id)
        if state is ReplicaState.UP:
            self.away.discard(replica_id)
        else:
            self.away.add(replica_id)
        self._serving.clear()

    def state_of(self, replica_id: int) -> ReplicaState:
        """Return a replica's state."""
        return self._live[replica_id].state

    def computes(self, replica_id: int) -> bool:
        """Return True if a replica forms steps: it is up, or it drains its remaining requests."""
        return self._live[replica_id].state in (ReplicaState.UP, ReplicaState.DRAINING)

    def is_up(self, replica_id: int) -> bool:
        """Return True if a replica takes requests."""
        return self._live[replica_id].is_up

    def _may_serve(self, replica_id: int) -> bool:
        """Return True if a replica takes requests, or may take requests again when a scaler starts it."""
        return self._live[replica_id].is_up or replica_id in self.away

    def _serving_of(self, holders: Holders) -> Serving:
        found = self._serving.get(holders)
        if found is None:
            found = self._serving[holders] = Serving(holders, self._may_serve, self.is_up)
        return found

    def lose(self, replica_id: int, detail: str, now: float) -> list[tuple[Request, EndReason]]:
        """Mark a replica as lost; end its requests, and the requests of the shared queue that only lost replicas can
        run; return the ended requests.
        """
        self.note_lost(replica_id)
        ended = self.replicas[replica_id].lose(detail, now)
        for request in self._stranded(now):
            self.shared.remove(request)
            end_request(request, EndReason.FAILED, detail, now)
            for observer in self.observers:
                observer.on_ended(request, EndReason.FAILED, detail, now)
            ended.append((request, EndReason.FAILED))
        for request in [one for one in self.held_back if one.replica_id == replica_id]:
            del self.held_back[request]
            end_request(request, EndReason.FAILED, detail, now)
            for observer in self.observers:
                observer.on_ended(request, EndReason.FAILED, detail, now)
            ended.append((request, EndReason.FAILED))
        return ended

    def _stranded(self, now: float) -> list[Request]:
        """Return the requests of the shared queue that only lost replicas can run, most urgent first."""
        if not self._all_lost and not self._differs:
            return []
        queued = [cast(Request, one) for one in self.shared.ordered(now)]
        return queued if self._all_lost else [one for one in queued if not self._may_run(one, now)]

    def _may_run(self, request: Request, now: float) -> bool:
        """Return True if a replica that is not lost can run the request."""
        return any(self._may_serve(one.replica_id) for one in self.eligible(request, now))

    def can_go_on(self, request: Request, now: float) -> bool:
        """Return True if a request can continue. A bound request needs its replica to form steps, a held one needs a
        decode replica that is up, and any other one needs an eligible replica that is up.
        """
        if request.state is RequestState.HELD:
            return any(self.is_up(one.replica_id) for one in self.bounds.holders(request).of_decodes)
        bound = request.replica_id >= 0
        return self.computes(request.replica_id) if bound else self._are_any_up(self.eligible(request, now))

    def _are_any_up(self, replicas: Iterable[Replica]) -> bool:
        return any(self._live[one.replica_id].is_up for one in replicas)

    def note_lost(self, replica_id: int) -> None:
        """Mark a replica as lost."""
        self.set_state(replica_id, ReplicaState.DOWN)
        self.away.discard(replica_id)
        self.lost.add(replica_id)
        self._serving.clear()

    def restore(self, replica_id: int) -> None:
        """Mark a lost replica as up again."""
        self.lost.discard(replica_id)
        self.set_state(replica_id, ReplicaState.UP)
        self._set_access(replica_id)

    @property
    def num_up(self) -> int:
        """Number of replicas that take requests."""
        return len(self.replicas) - len(self.lost) - len(self.away)

    def can_serve_with(self, replica_ids: Iterable[int]) -> bool:
        """Return True if some of these replicas compute prompts and some decode."""
        return have_both_roles(self.replicas[one] for one in replica_ids)

    @property
    def _all_lost(self) -> bool:
        return len(self.lost) == len(self.replicas)

    # Admission

    def refusal(self, request: Request, now: float) -> str | None:
        """Return the reason why this request cannot be accepted, now or ever; None if it can."""
        return self.why_never(request, now) or self.why_full(request)

    def why_never(self, request: Request, now: float) -> str | None:
        """Return the reason why no replica will run this request; None if a replica can."""
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
        if request.adapter and not any(one.has_adapter(request) for one in self.replicas):
            return f"no replica has its adapter ({request.adapter!r})"
        holders = bounds.holders(request)
        if not holders.can_serve:
            return bounds.why_nobody(request)
        if self._differs and not self._serving_of(holders).can_serve:
            serving, num_holders, total = self._serving_of(holders).all, len(holders.all), len(self.replicas)
            if serving:
                lacking = "compute its prompt" if serving[0].parts.role is PoolRole.DECODE else "go on after its prompt"
                return f"{ALL_FAILED} that could {lacking} ({num_holders - len(serving)} of {total})"
            return f"{ALL_FAILED} that has room for it ({num_holders} of {total})"
        if not self.may_refuse:
            return None
        return first_refusal(self._serving_of(holders).all, self.load_of, request, now)

    def why_full(self, request: Request) -> str | None:
        """Return the reason why the queues have no room for this request; None if they have room."""
        waiting = self.admission.max_queued_requests
        if waiting is not None and self.num_queued >= waiting:
            return f"{QUEUE_FULL} ({self.num_queued} requests wait, at most {waiting} may)"
        tokens = self.admission.max_queued_tokens
        if tokens is not None and self.num_queued_tokens + request.num_prompt_tokens > tokens:
            return f"{QUEUE_FULL} ({self.num_queued_tokens} tokens wait, at most {tokens} may)"
        return None

    def load_of(self, replica_id: int) -> ReplicaLoadView:
        """Return a replica's load for a policy that may refuse a request; ended steps are applied when a figure is
        read.

        Such a policy is called at every arrival and rarely reads a figure: if ended steps were applied before each
        call, a simulation would take a tenth longer (the Azure conversation trace under `vllm_v1`). Every other policy
        declares whether it reads loads.
        """
        return cast(ReplicaLoadView, LoadOnDemand(self._live[replica_id], self.sync))

    def live_loads(self) -> Sequence[ReplicaLoadView]:
        """Apply every ended step; return the replicas' loads with live figures, by id."""
        self.sync()
        return cast(Sequence[ReplicaLoadView], self._live)

    @property
    def num_queued(self) -> int:
        """Number of waiting requests: those in the shared queue, those in the replicas' own queues, and those held
        back.
        """
        return len(self.shared) + len(self.held_back) + sum(len(replica.queue) for replica in self.replicas)

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens that are left to compute for the waiting requests."""
        held_back = sum(one.num_remaining_tokens for one in self.held_back)
        return self.shared.num_tokens + held_back + sum(replica.queue.num_tokens for replica in self.replicas)

    def accept(self, request: Request, now: int) -> Replica | None:
        """Notify policies of an accepted request and queue it; return the replica to which it is bound, None if it is
        in the shared queue.
        """
        if self.listeners.arrivals:
            seconds = to_seconds(now)
            for notify in self.listeners.arrivals:
                notify((request,), seconds)
        request.move_to(RequestState.WAITING)
        request.caches = self
        return self.place(request, now)

    def prefix_hits(self, request: Request) -> int:
        """Return the number of leading tokens of a request in the prefix cache of its replica."""
        if request.hashes is None:
            return 0
        return self._memory_of(request).lookup_prefix(request.hashes, request.num_known_tokens)

    def tier_hits(self, request: Request) -> Mapping[str, int]:
        """Return the number of leading tokens of a request in each memory of its replica, by name; each token counts
        for the nearest memory that holds it. Empty without tiers.
        """
        if request.hashes is None:
            return {}
        return self._memory_of(request).tier_hits(request.hashes, request.num_known_tokens)

    def _memory_of(self, request: Request) -> KvMemory:
        replica = self.replicas[request.replica_id]
        if replica.num_in_flight:  # some ended steps of the replica are perhaps not applied yet
            self.sync()
        return replica.memory

    def place(self, request: Request, now: int) -> Replica | None:
        """Queue a request that is in no queue; return what `accept` returns."""
        seconds = to_seconds(now)
        candidates = self.eligible(request, seconds)
        # If no candidate is up, the request waits in the shared queue.
        may_assign = self._are_any_up(candidates) if self._differs else self.num_up > 0
        replica_id = None
        if may_assign:
            others = self._unfailed(request, candidates, PoolRole.DECODE)
            replica_id = self._assign(request, others, candidates, seconds)
            if replica_id is None and others is not candidates:
                replica_id = self._assign(request, candidates, candidates, seconds)
        for observer in self.observers:
            observer.on_assigned(request, replica_id, seconds)
        return self.bind(request, replica_id, seconds)

    def place_again(self, request: Request, lost_by: int, *, was_admitted: bool, now: int) -> Replica | None:
        """Queue a request that replica `lost_by` has lost; return what `accept` returns. Policies are notified of a
        preemption if the request had been admitted.
        """
        seconds = to_seconds(now)
        for observer in self.observers:
            observer.on_requeued(request, lost_by, seconds)
        if was_admitted:
            for notify in self.replicas[lost_by].lifecycle.listeners.preemptions:
                notify(request, lost_by, seconds)
        return self.place(request, now)

    def bind(self, request: Request, replica_id: int | None, now: float) -> Replica | None:
        """Queue a request at a replica, or in the shared queue (None). A prompt that needs blocks of a decode replica
        first is held back instead.
        """
        if replica_id is None:
            self.shared.add(request, now)
            self._queued_by_id[request.request_id] = request
            return None
        replica = self.replicas[replica_id]
        if self.hand_off is not None and self.hand_off.reserves_first and replica.parts.role is PoolRole.PREFILL:
            request.replica_id = replica_id
            self.held_back[request] = None
            self.newly_held_back.append(request)
        else:
            replica.enqueue(request, now)
        return replica

    def _assign(
        self, request: Request, candidates: Sequence[Replica], allowed: Sequence[Replica], now: float
    ) -> int | None:
        """Return the scheduler's choice among the candidates, which are some or all of the allowed replicas; None: no
        choice. If the choice is no candidate or is not up, call the scheduler again with all allowed replicas.
        """
        loads = self._live if candidates is self.replicas else self._views.live_of(candidates)
        chosen = self._ask(self._assign_call, request, self._views.seen(loads, now), now)
        if chosen is None:
            return None
        if type(chosen) is int and chosen in loads.ids and self._live[chosen].is_up:
            return chosen
        if candidates is not allowed:
            return self._assign(request, allowed, allowed, now)
        return self._checked(chosen, candidates, request, self.scheduler.assign)

    def place_after_prompt(self, request: Request, now: float) -> int | None:
        """Return the replica to continue a request after its prompt; None if the request stays, or if no replica is
        available now.

        If the scheduler binds late (its `assign` returns None), the replica with the most free blocks is chosen among
        those with free blocks and a free batch slot.
        """
        candidates = self._serving_of(self.bounds.holders(request)).of_decodes
        if not candidates:
            return None
        others = self._unfailed(request, candidates, PoolRole.PREFILL)
        chosen = self._placed_among(request, others, candidates, now)
        if chosen is None and self.places_itself and others is not candidates:
            return self._placed_among(request, candidates, candidates, now)
        return chosen

    def _placed_among(
        self, request: Request, candidates: Sequence[Replica], allowed: Sequence[Replica], now: float
    ) -> int | None:
        loads = self._views.live_of(candidates)
        views = self._views.seen(loads, now)
        chosen = self._ask(self._place[1], request, views, now)
        if chosen is None and not self.places_itself:
            able = [one for one in views if one.num_running + one.num_waiting < one.max_batch_size and one.free_blocks]
            chosen = max(able, key=lambda one: (one.free_blocks, -one.replica_id)).replica_id if able else None
        if type(chosen) is int and chosen in loads.ids:
            return chosen
        if chosen is not None and candidates is not allowed:
            return self._placed_among(request, allowed, allowed, now)
        return None if chosen is None else self._checked(chosen, candidates, request, self._place[0])

    def place_running(self, request: Request, candidates: Sequence[Replica], now: float) -> int | None:
        """Return one of these replicas, which are up, to continue a running request; None if the request stays.

        If the scheduler binds late (its `assign` returns None), the replica with the most free blocks is chosen.
        """
        if not candidates:
            return None
        views = self._views.seen(self._views.live_of(candidates), now)
        chosen = self._ask(self._place[1], request, views, now)
        if chosen is not None:
            return self._checked(chosen, candidates, request, self._place[0])
        if self.places_itself:
            return None
        return max(candidates, key=lambda one: (one.memory.free_blocks, -one.replica_id)).replica_id

    def _ask(self, call: Callable[..., Any], request: Request, views: Sequence[ReplicaLoadView], now: float) -> Any:
        if self.feed is not None:
            self.feed.deliver(now)
        try:
            return call(request, views, now)
        except VajraError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise PolicyError.caused_by(self.scheduler_name, error, request_id=request.request_id) from error

    def _checked(
        self, chosen: object, candidates: Sequence[Replica], request: Request, method: Callable[..., Any]
    ) -> int:
        """Return a scheduler's choice as an `int`. Raises `PolicyError` unless the choice is one of the candidates that
        are up.
        """
        up = [one.replica_id for one in candidates if self.is_up(one.replica_id)]
        if not isinstance(chosen, Integral) or int(chosen) not in up:
            which = "that are up" if candidates is self.replicas else "that are up and can run it"
            message = f"assigned a request to replica {chosen!r}. Replicas {which}: {up}"
            place = place_of_definition(method)
            raise PolicyError(self.scheduler_name, message, request_id=request.request_id, place=place)
        return int(chosen)

    def asked_moves(self, now: float) -> Sequence[Move]:
        """Return the moves that the scheduler requests now. Raises `PolicyError`."""
        scheduler = self.scheduler
        if not isinstance(scheduler, MovesRequests):
            return ()
        try:
            moves: list[Move] = []
            answer: Iterable[object] = scheduler.moves(self._views.all(now), now)
            for one in answer:
                if not isinstance(one, Move):
                    message, place = f"moves {one!r}; expected a Move", place_of_definition(scheduler.moves)
                    raise PolicyError(self.scheduler_name, message, place=place)
                moves.append(one)
            return moves
        except VajraError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise PolicyError.caused_by(self.scheduler_name, error) from error

    def pulled_by(self, view: ReplicaLoadView, now: float) -> Iterator[RequestView]:
        """Iterate over the requests of the shared queue that the scheduler allows this replica to take."""
        replica_id = view.replica_id
        if self.feed is not None:
            self.feed.deliver(now)
        pulled: set[str] = set()
        try:
            answer: object = self.scheduler.pull(view, self._shared_view(replica_id, now), now)
            if not isinstance(answer, Iterable) or isinstance(answer, str):
                raise self._wrong_pull(f"pull() returned {answer!r}. Allowed: an iterable of request ids")
            for request_id in answer:
                if not isinstance(request_id, str):
                    raise self._wrong_pull(f"pulled {request_id!r}; expected the id of a request")
                request = self._queued_by_id.get(request_id)
                if request is None or request not in self.shared:
                    how = "twice" if request_id in pulled else "that is not in the shared queue"
                    raise self._wrong_pull(f"pulled a request {how}", request_id)
                pulled.add(request_id)
                if self._failed_at and self._leaves_to_others(replica_id, request):
                    continue
                if not self._differs or self._can_run(replica_id, request, now):
                    yield request
        except VajraError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise PolicyError.caused_by(self.scheduler_name, error) from error

    def _wrong_pull(self, message: str, request_id: str | None = None) -> PolicyError:
        place = place_of_definition(self.scheduler.pull)
        return PolicyError(self.scheduler_name, message, request_id=request_id, place=place)

    def avoid(self, request: Request, replica_id: int) -> None:
        """From now on, when a request is placed, avoid a replica on which the request failed, as long as other replicas
        are up.

        If the scheduler chooses none of the other replicas, it is called again with all. The replica may pull the
        request from the shared queue only if the request also failed on all other replicas of the pool that are up.
        """
        self._failed_at.setdefault(request, set()).add(replica_id)

    def _unfailed(self, request: Request, candidates: Sequence[Replica], unable: PoolRole) -> Sequence[Replica]:
        """Return the candidates on which the request has not failed, if at least one of these is up and has a role
        other than `unable`; else return all candidates.
        """
        failed = self._failed_at.get(request)
        if failed is None:
            return candidates
        others = tuple(one for one in candidates if one.replica_id not in failed)
        able = [one for one in others if one.parts.role is not unable]
        return others if self._are_any_up(able) else candidates

    def _leaves_to_others(self, replica_id: int, request: Request) -> bool:
        failed = self._failed_at.get(request, ())
        pool = self.replicas[replica_id].parts.pool
        return replica_id in failed and any(
            one.parts.pool == pool and one.replica_id not in failed and self.is_up(one.replica_id)
            for one in self.replicas
        )

    def _shared_view(self, replica_id: int, now: float) -> QueueView:
        if not self._differs:
            return SharedView(self.shared, now)
        return EligibleView(self.shared, now, lambda request: self._can_run(replica_id, cast(Request, request), now))

    def _can_run(self, replica_id: int, request: Request, now: float) -> bool:
        return any(one.replica_id == replica_id for one in self.eligible(request, now))

    def offers(self, replica_id: int, now: int) -> bool:
        """Return True if the replica may pull a request from the shared queue."""
        return (
            self.is_up(replica_id) and next(self.pulled_by(self._live[replica_id], to_seconds(now)), None) is not None
        )

    def unbind(self, request: Request) -> None:
        """Remove a waiting request from its queue, or from `held_back`."""
        if request in self.shared:
            self.shared.remove(request)
            return
        if request in self.held_back:
            del self.held_back[request]
        else:
            replica = self.replicas[request.replica_id]
            replica.queue.remove(request)
            replica.memory.forget(request)
        request.replica_id = request.stays_at = -1

    def forget(self, request: Request) -> None:
        """Drop the data about a request that has ended."""
        self._queued_by_id.pop(request.request_id, None)
        self._eligible.pop(request, None)
        self._failed_at.pop(request, None)

    def abort(self, request: Request, reason: EndReason, now: float, detail: str = "") -> bool:
        """Abort or expire a request of the shared queue or of a replica; return False if its step must complete
        first.
        """
        if request in self.shared:
            self.shared.remove(request)
            end_request(request, reason, detail, now)
            for observer in self.observers:
                observer.on_ended(request, reason, detail, now)
            return True
        return self.replicas[request.replica_id].abort(request, reason, now, detail)


_HAND_OFF_NOTES = ("on_held", "on_transfer", "on_transfer_end", "on_arrived", "on_kv_released", "on_stayed")


def _notes_hand_offs(observer: Observer) -> bool:
    """Return True if an observer implements a callback for hand-offs."""
    return any(getattr(type(observer), name) is not getattr(Observer, name) for name in _HAND_OFF_NOTES)


def _do_nothing() -> None:
    """Do nothing: every ended step is applied already."""
