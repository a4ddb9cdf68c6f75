"""Replace a replicaset's policies while it serves, completely or not at all; steps in flight continue.

- A request prioritizer: waiting requests are queued again under its keys; running ones continue.
- A replicaset scheduler: waiting requests without computed tokens are placed again, in order of arrival; others stay.
- A replica scheduler: every replica gets a new one. Predicted prefill times depend on its chunks, so queues are
rebuilt.

Errors are detected before a change, or the change is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from vajra_py.contract import Layer, MovesRequests, PlacesAfterPrompt
from vajra_py.contract.observer import PolicySwap
from vajra_py.errors import ConfigError, Problem, VajraError
from vajra_py.plugins import kind_of
from vajra_py.runtime.queues import RequestQueue
from vajra_py.runtime.records.input_log import PolicyChange
from vajra_py.runtime.requests.listeners import listeners_among
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.eligibility import refusal_of
from vajra_py.runtime.serving.policy_binding import LayerPolicies, Policies
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.support.clock import to_seconds


class Swapped(Struct, frozen=True):
    """Result of replacing a policy."""

    swap: PolicySwap
    moved: Sequence[tuple[Request, Replica | None]] = ()
    """Requests that were placed again, each with its new replica (None: the shared queue)."""


def swap_policy(replicaset: Replicaset, change: PolicyChange, alive: Sequence[Request], now: int) -> Swapped:
    """Replace the policy of a layer. `alive`: the replicaset's requests that have not ended, in order of submission.

    A replicaset that is out of service because a policy broke the contract must be empty, and starts again with new
    policies in all layers. Raises the errors of building a policy, `ConfigError` if the new policy would never run a
    request that is being served, and `PolicyError` if the new policy breaks the contract immediately; in each case the
    old policy stays.
    """
    policies = replicaset.policies
    if policies is None:
        raise ConfigError(
            Problem(
                f"replicaset {replicaset.name}", "was not built from a configuration; its policies cannot be replaced"
            )
        )
    layer, old = change.layer, policies.layer(change.layer)
    if replicaset.out_of_service:  # every layer gets new policies, without the state that the old ones shared
        policies.shared.clear()
    made = policies.make(layer, change.choice)
    replacing = {layer: made}
    if replicaset.out_of_service:
        replacing |= {other: policies.make_again(other) for other in Layer if other is not layer}
    policies.check_needs(replacing)
    if replicaset.hand_off is None and any(isinstance(one, PlacesAfterPrompt | MovesRequests) for one in made.made):
        what = "moves requests between replicas, and its replicaset was built for a scheduler that does not"
        raise ConfigError(Problem(f"replicaset {replicaset.name}", f"{change.choice.policy} {what}"))
    _announce_arrivals(change.choice.policy, made, alive, to_seconds(now))
    moved: Sequence[tuple[Request, Replica | None]] = ()
    num_requeued = 0
    if replicaset.out_of_service:
        for other, policies_of_layer in replacing.items():
            policies.put(other, policies_of_layer)
        _start_again(replicaset, policies)
    else:
        moved, num_requeued = _SWAPS[layer](replicaset, policies, change, (made, alive, now))
    old_params = old.choices[0].params if old.are_alike else {}
    choice = change.choice
    swap = PolicySwap(replicaset.name, layer, old.name, old_params, choice.policy, choice.params, num_requeued)
    return Swapped(swap, moved)


_Given = tuple[LayerPolicies, Sequence[Request], int]
"""(new policies of the layer, requests that have not ended, tick)."""
_Done = tuple[Sequence[tuple[Request, Replica | None]], int]


def _announce_arrivals(name: str, made: LayerPolicies, alive: Sequence[Request], now: float) -> None:
    """Pass the present requests, as arrivals, to those of the new policies that listen to arrivals."""
    if alive:
        for notify in listeners_among((one, name) for one in made.made).arrivals:
            notify(alive, now)


def _swap_prioritizer(replicaset: Replicaset, policies: Policies, change: PolicyChange, given: _Given) -> _Done:
    made, _, now = given
    before = policies.layer(change.layer)
    policies.put(change.layer, made)
    try:
        queues = _queued_anew(replicaset, policies, to_seconds(now))
    except VajraError:
        policies.put(change.layer, before)
        raise
    return (), bind_all(replicaset, policies, queues)


def _swap_replica_schedulers(replicaset: Replicaset, policies: Policies, change: PolicyChange, given: _Given) -> _Done:
    made, alive, now = given
    _check_refusals(replicaset, change.choice.policy, made, (alive, to_seconds(now)))
    before, tables = policies.layer(change.layer), policies.prefill_time.tables
    policies.put(change.layer, made)
    policies.follow_chunks()
    try:
        queues = _queued_anew(replicaset, policies, to_seconds(now))
    except VajraError:
        policies.put(change.layer, before)
        policies.prefill_time.follow(tables)
        raise
    return (), bind_all(replicaset, policies, queues)


def _swap_replicaset_scheduler(
    replicaset: Replicaset, policies: Policies, change: PolicyChange, given: _Given
) -> _Done:
    made, alive, now = given
    before = policies.layer(change.layer)
    waiting = [one for one in alive if one in replicaset.shared or one.state is RequestState.WAITING]
    places = [one.replica_id for one in waiting]
    for request in waiting:
        replicaset.unbind(request)
    policies.put(change.layer, made)
    replicaset.bind_policy(policies.replicaset_scheduler, change.choice.policy)
    try:
        moved = [(request, replicaset.place(request, now)) for request in waiting]
    except VajraError:
        policies.put(change.layer, before)
        replicaset.bind_policy(policies.replicaset_scheduler, policies.name(change.layer))
        for request, replica_id in zip(waiting, places, strict=True):
            if request in replicaset.shared or request.replica_id >= 0:
                replicaset.unbind(request)
            replicaset.bind(request, replica_id if replica_id >= 0 else None, to_seconds(now))
        raise
    bind_all(replicaset, policies, None)
    return moved, len(moved)


_SWAPS: dict[Layer, Callable[[Replicaset, Policies, PolicyChange, _Given], _Done]] = {
    Layer.REQUEST_PRIORITIZER: _swap_prioritizer,
    Layer.REPLICASET_SCHEDULER: _swap_replicaset_scheduler,
    Layer.REPLICA_SCHEDULER: _swap_replica_schedulers,
}


def _check_refusals(
    replicaset: Replicaset, name: str, made: LayerPolicies, served: tuple[Sequence[Request], float]
) -> None:
    alive, now = served
    for request in alive:
        bound = [replicaset.replicas[request.replica_id]] if request.replica_id >= 0 else None
        first: str | None = None
        for replica in bound or replicaset.bounds.holders(request).all:
            replica_id = replica.replica_id
            reason = refusal_of(made.made[replica_id], name, replicaset.load_of(replica_id), request, now)
            if reason is None:
                break
            first = first or reason
        else:
            what = f"{name!r} would never run request {request.request_id!r}, which is being served ({first})"
            raise ConfigError(Problem(kind_of(Layer.REPLICA_SCHEDULER), what, "Try again when it has ended"))


def _queued_anew(replicaset: Replicaset, policies: Policies, now: float) -> list[RequestQueue]:
    """Return new queues with the waiting requests of the shared queue and of each replica's own queue."""
    queues = []
    for old in (replicaset.shared, *(replica.queue for replica in replicaset.replicas)):
        queue = policies.new_queue()
        for request in old:
            queue.add(request, now)
        queues.append(queue)
    return queues


def bind_all(replicaset: Replicaset, policies: Policies, queues: Sequence[RequestQueue] | None) -> int:
    """Bind the replicaset and its replicas to the present policies, with new queues if `queues` is given; return the
    number of waiting requests.
    """
    if queues is not None:
        replicaset.share(queues[0])
    replicaset.listeners = policies.listeners()
    for replica in replicaset.replicas:
        replica_id = replica.replica_id
        replica.bind_policy(
            structs.replace(
                replica.parts,
                queue=replica.queue if queues is None else queues[1 + replica_id],
                policy=policies.schedulers[replica_id],
                policy_name=policies.scheduler_name(replica_id),
                listeners=policies.listeners_of(replica_id),
                slack=policies.slack(),
            )
        )
    replicaset.on_schedulers_bound()
    replicaset.bind_content()
    return replicaset.num_queued


def _start_again(replicaset: Replicaset, policies: Policies) -> None:
    policies.follow_chunks()
    replicaset.bind_policy(policies.replicaset_scheduler, policies.name(Layer.REPLICASET_SCHEDULER))
    bind_all(replicaset, policies, [policies.new_queue() for _ in range(1 + len(replicaset.replicas))])
    replicaset.out_of_service = ""
