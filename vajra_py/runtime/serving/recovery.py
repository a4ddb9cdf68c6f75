"""Requeue or end requests whose replica was lost or whose policy broke the contract.

Requests of a lost replica keep their tokens so far and are recomputed, or they end. Requests of a replicaset whose
policy broke the contract end, each with the reason, and none of the replicaset's policies is called until that policy
is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from msgspec import Struct, field, structs

from vajra_py.contract.observer import EndReason
from vajra_py.runtime.records.input_log import Failure
from vajra_py.runtime.requests.lifecycle import end_request
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.support.clock import to_seconds

Ended = list[tuple[Request, EndReason]]


class Losses(Struct):
    """Effect of the loss of a replica on its requests."""

    ended: Ended = field(default_factory=list)
    moved: list[tuple[Request, Replica | None]] = field(default_factory=list)
    """Requests to be recomputed, each with the replica to which it is bound now (None: the shared queue)."""


def lose_replica(replicaset: Replicaset, replica: Replica, failure: Failure, now: int) -> Losses:
    """Handle the loss of a replica. `failure.max_reruns`: maximum number of times that a request is recomputed; None:
    the replica's requests end.
    """
    seconds, why, max_reruns = to_seconds(now), failure.detail, failure.max_reruns
    for observer in replicaset.observers:
        observer.on_replica_lost(replica.replicaset, replica.replica_id, why, seconds)
    if max_reruns is None:
        return Losses(ended=replicaset.lose(replica.replica_id, why, seconds))
    replicaset.note_lost(replica.replica_id)
    losses = Losses()
    to_end = dict(replica.to_end)
    held = [*replica.running_set.running(), *replica.running_set.in_flight]
    leaving = [one for one in replica.lifecycle.held if one.state is RequestState.HELD]
    admitted = frozenset((*held, *leaving))
    left = [*held, *leaving, *(cast(Request, one) for one in replica.queue.ordered(seconds))]
    for request in [one for one in replicaset.held_back if one.replica_id == replica.replica_id]:
        del replicaset.held_back[request]
        left.append(request)
    for request in held:
        request.num_losses += failure.guilty is None or request.request_id in failure.guilty
        request.num_preemptions += 1
    for request in left:
        replica.lifecycle.requeue(request)
    replica.clear()
    for request in left:
        if request in to_end:
            _end(replicaset, request, to_end[request], seconds, losses.ended)
        elif request.num_losses > max_reruns:
            detail = f"{why}; it had run again {max_reruns} times"
            _end(replicaset, request, (EndReason.FAILED, detail), seconds, losses.ended)
        elif not replicaset.bounds.holders(request).of_prompts:
            detail = f"{why}; its {request.num_known_tokens} tokens fit on no replica that computes prompts"
            _end(replicaset, request, (EndReason.FAILED, detail), seconds, losses.ended)
        else:
            was_admitted = request in admitted
            placed = replicaset.place_again(request, replica.replica_id, was_admitted=was_admitted, now=now)
            losses.moved.append((request, placed))
    return losses


def reset_cache(replica: Replica, now: float) -> Sequence[Request]:
    """Empty a replica's KV memory and prefix cache, between two steps and while no request is swapped out.

    Returns the requests that were running and wait again, the latest admitted first.
    """
    if replica.num_in_flight:
        raise RuntimeError(f"a step of replica {replica.replica_id} is in flight, and its memory cannot be emptied")
    held = list(reversed(replica.running_set.running()))
    leaving = [one for one in replica.lifecycle.held if one.state is RequestState.HELD]
    for request in held:
        replica.lifecycle.lose_memory(request, now)
    # Requests that do not run, but whose KV is on this replica: those held for a hand-off, those that a hand-off
    # has brought here, and those whose KV load has ended.
    for request in [*leaving, *replica.running_set.arrived]:
        request.set_computed(0)
        request.move_to(RequestState.PREEMPTED)
        replica.queue.touch(request)
    # `loading` has only requests that load KV: transfers of KV from other replicas were cancelled before.
    for request in replica.running_set.loading:
        request.set_computed(0)
        request.move_to(RequestState.PREEMPTED)
        replica.queue.touch(request)
    for request in leaving:
        replica.queue.add(request, now)
    replica.lifecycle.held.clear()
    replica.running_set.arrived.clear()
    replica.running_set.loading.clear()
    replica.memory.clear()
    if replica.lifecycle.connected is not None:
        replica.lifecycle.connected.clear()
    if replica.memory.tiers is not None:
        replica.memory.tiers.clear_shared()
    for waiting in replica.queue:
        request = cast(Request, waiting)
        replica.memory.register(request, request.hashes)
    return held


def abandon(replicaset: Replicaset, why: str, now: int) -> Ended:
    """End the requests of the shared queue, because no replica is up or will be up in time."""
    seconds, ended = to_seconds(now), Ended()
    for request in [cast(Request, one) for one in replicaset.shared.ordered(seconds)]:
        replicaset.shared.remove(request)
        _end(replicaset, request, (EndReason.FAILED, why), seconds, ended)
    return ended


def take_out_of_service(replicaset: Replicaset, alive: Sequence[Request], why: str, now: int) -> Ended:
    """End every request and drop all state after a policy broke the contract, even if it did so while a step was being
    formed or completed.
    """
    replicaset.out_of_service = why
    seconds, ended = to_seconds(now), Ended()
    for observer in replicaset.observers:
        observer.on_out_of_service(replicaset.name, why, seconds)
    policies = replicaset.policies
    assert policies is not None
    replicaset.held_back.clear()
    replicaset.newly_held_back.clear()
    replicaset.share(policies.new_queue())
    for replica in replicaset.replicas:
        replica.bind_policy(structs.replace(replica.parts, queue=policies.new_queue()))
        replica.clear()
    for request in alive:
        if request.state is RequestState.ENDED:  # it ended in the interrupted step, and its end was not reported
            assert request.end_reason is not None
            ended.append((request, request.end_reason))
        else:
            _end(replicaset, request, (EndReason.FAILED, why), seconds, ended)
    return ended


def _end(replicaset: Replicaset, request: Request, how: tuple[EndReason, str], now: float, ended: Ended) -> None:
    reason, detail = how
    end_request(request, reason, detail, now)
    for observer in replicaset.observers:
        observer.on_ended(request, reason, detail, now)
    ended.append((request, reason))
