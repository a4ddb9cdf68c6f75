"""Policies of a replicaset, and the building of policies that replace them.

Each replicaset keeps its factory of policies while it serves, so that a later policy gets the same sizes, predictions
and named random streams as the first ones. Replica schedulers are built first, each with the limits and the latency
model of its replica. Prefill times are predicted from the schedulers' chunks, and the policies of the other two layers
are built with these predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from msgspec import Struct, structs

from vajra_py.config import PolicyChoice
from vajra_py.contract import (
    GroupsRequests,
    KeyMotion,
    Layer,
    PinsContent,
    PlacesAfterPrompt,
    PredictsSlack,
    ReplicaScheduler,
    ReplicasetScheduler,
    RequestPrioritizer,
    RequestView,
    SharedState,
)
from vajra_py.contract.policies import traits_of
from vajra_py.errors import POLICY_EXCEPTIONS, ConfigError, PolicyError, Problem, VajraError
from vajra_py.runtime.kv import Retention
from vajra_py.runtime.queues import RequestQueue, make_queue
from vajra_py.runtime.queues.keys import SlackReader
from vajra_py.runtime.requests.listeners import NOBODY, Listeners, listeners_among
from vajra_py.runtime.requests.pinning import checked_seconds
from vajra_py.runtime.serving.prefill_times import PrefillTable, ReplicasetPrefillTime

MakePolicy = Callable[[Layer, PolicyChoice, int], Any]
"""Function of (layer, choice, index) that builds one policy and checks its methods; for a replica scheduler, the index
is the replica's id. Raises the errors of `vajra_py.plugins.build_policy`.
"""
Predict = Callable[[Sequence[PolicyChoice], Sequence[ReplicaScheduler]], Sequence[PrefillTable]]
"""Function of the replica schedulers (choice and object for each replica) that returns prefill times, one table for
each kind of replica.
"""


class LayerPolicies(Struct, frozen=True):
    """Policies of a layer (one for each replica if they are replica schedulers, otherwise one or two), and the choices
    from which they were built.
    """

    choices: Sequence[PolicyChoice]
    made: Sequence[Any]

    @property
    def name(self) -> str:
        """Name of the policy; if replicas have different schedulers, all names, each once."""
        return ", ".join(dict.fromkeys(choice.policy for choice in self.choices))

    @property
    def are_alike(self) -> bool:
        """True if all policies of the layer were built from the same choice."""
        return all(choice == self.choices[0] for choice in self.choices)

    @property
    def common_choice(self) -> PolicyChoice:
        """Choice from which all policies of the layer were built. Raises `ConfigError` if replicas have different
        schedulers.
        """
        if not self.are_alike:
            raise ConfigError(Problem("scheduling.replica_scheduler", f"replicas have different ones ({self.name})"))
        return self.choices[0]


class Policies:
    """The policies of one replicaset, by layer, with their listeners."""

    def __init__(
        self,
        choices: Mapping[Layer, PolicyChoice],
        scheduler_choices: Sequence[PolicyChoice],
        make: MakePolicy,
        prefill_time: ReplicasetPrefillTime,
        predict: Predict,
        *,
        is_split: bool = False,
    ) -> None:
        """Build the policies. `choices`: the choices for the prioritizer and the replicaset scheduler;
        `scheduler_choices`: the choice for each replica's scheduler.
        """
        self._num_replicas = len(scheduler_choices)
        self._is_split = is_split
        self._make = make
        self._predict = predict
        self.prefill_time = prefill_time
        self.shared = SharedState()
        """State shared by these policies, and by policies that are built later."""
        self.beside: Sequence[tuple[Any, str]] = ()
        """Other policies that get request events, with their names; they belong to no layer."""
        self.retention: Sequence[Retention | None] = (None,) * self._num_replicas
        """Retention policy of each replica; None if it has none."""
        schedulers = [make(Layer.REPLICA_SCHEDULER, choice, one) for one, choice in enumerate(scheduler_choices)]
        self._layers = {Layer.REPLICA_SCHEDULER: LayerPolicies(tuple(scheduler_choices), schedulers)}
        self.follow_chunks()
        for layer in (Layer.REQUEST_PRIORITIZER, Layer.REPLICASET_SCHEDULER):
            self._layers[layer] = self.make(layer, choices[layer])
        self.check_needs()

    def make(self, layer: Layer, choice: PolicyChoice) -> LayerPolicies:
        """Build new policies of a layer without putting them in force: one for each replica if they are replica
        schedulers, otherwise one, or two if a `decode_scheduler` is needed.
        """
        if layer is Layer.REPLICA_SCHEDULER:
            replicas = range(self._num_replicas)
            return LayerPolicies((choice,) * len(replicas), [self._make(layer, choice, one) for one in replicas])
        made = [self._make(layer, choice, 0)]
        if layer is Layer.REPLICASET_SCHEDULER and self._is_split and not isinstance(made[0], PlacesAfterPrompt):
            made.append(self._make(layer, choice, 1))
        return LayerPolicies((choice,) * len(made), made)

    def make_again(self, layer: Layer) -> LayerPolicies:
        """Build new policies of a layer from its present choices, without putting them in force."""
        choices = self._layers[layer].choices
        if layer is not Layer.REPLICA_SCHEDULER:
            return self.make(layer, choices[0])
        made = [self._make(layer, choice, one) for one, choice in enumerate(choices)]
        return LayerPolicies(choices, made)

    def put(self, layer: Layer, policies: LayerPolicies) -> None:
        """Put these policies in force."""
        self._layers[layer] = policies

    def follow_chunks(self) -> None:
        """From now on, predict prefill times from the chunks that the present replica schedulers form."""
        schedulers = self._layers[Layer.REPLICA_SCHEDULER]
        self.prefill_time.follow(self._predict(schedulers.choices, schedulers.made))

    def check_needs(self, replacing: Mapping[Layer, LayerPolicies] | None = None) -> None:
        """Raise `ConfigError` if a replica scheduler needs slack and the prioritizer predicts none. `replacing`:
        policies that are checked in place of the present ones of their layers.
        """
        layers = {**self._layers, **(replacing or {})}
        prioritizer, schedulers = layers[Layer.REQUEST_PRIORITIZER], layers[Layer.REPLICA_SCHEDULER]
        named = zip((choice.policy for choice in schedulers.choices), schedulers.made, strict=True)
        for one in prioritizer.made:
            check_slack(one, prioritizer.name, named)

    # Policies in force

    def layer(self, layer: Layer) -> LayerPolicies:
        """Return the policies of a layer."""
        return self._layers[layer]

    def common_choices(self) -> dict[Layer, PolicyChoice]:
        """Return the choice of each layer. Raises `ConfigError` if replicas have different schedulers."""
        return {layer: self._layers[layer].common_choice for layer in Layer}

    @property
    def prioritizer(self) -> RequestPrioritizer:
        """The prioritizer of every queue."""
        return cast(RequestPrioritizer, self._layers[Layer.REQUEST_PRIORITIZER].made[0])

    @property
    def replicaset_scheduler(self) -> ReplicasetScheduler:
        """The scheduler of the replicaset."""
        return cast(ReplicasetScheduler, self._layers[Layer.REPLICASET_SCHEDULER].made[0])

    @property
    def decode_scheduler(self) -> ReplicasetScheduler | None:
        """Second instance of the replicaset scheduler, which places requests after their prompts. None if the first
        instance does so (`PlacesAfterPrompt`), or if all replicas compute both prompts and decodes.
        """
        made = self._layers[Layer.REPLICASET_SCHEDULER].made
        return cast(ReplicasetScheduler, made[1]) if len(made) > 1 else None

    @property
    def schedulers(self) -> Sequence[ReplicaScheduler]:
        """The scheduler of each replica."""
        return self._layers[Layer.REPLICA_SCHEDULER].made

    @property
    def are_schedulers_alike(self) -> bool:
        """True if all replicas have the same scheduler with the same parameters."""
        return self._layers[Layer.REPLICA_SCHEDULER].are_alike

    def name(self, layer: Layer) -> str:
        """Return the name of the layer's policy, for error messages."""
        return self._layers[layer].name

    def scheduler_name(self, replica_id: int) -> str:
        """Return the name of a replica's scheduler, for error messages."""
        return self._layers[Layer.REPLICA_SCHEDULER].choices[replica_id].policy

    def new_queue(self) -> RequestQueue:
        """Return an empty queue in the prioritizer's order."""
        return make_queue(self.prioritizer, self.name(Layer.REQUEST_PRIORITIZER))

    def slack(self) -> SlackReader | None:
        """Return a reader of the slack that the prioritizer predicts; None if it predicts none."""
        return slack_reader(self.prioritizer, self.name(Layer.REQUEST_PRIORITIZER))

    # Listeners

    def listeners(self) -> Listeners:
        """Return the callbacks of all policies of the replicaset."""
        layers = {
            layer: [
                (one, choice.policy)
                for one, choice in zip(self._layers[layer].made, self._layers[layer].choices, strict=True)
            ]
            for layer in Layer
        }
        own = layers.pop(Layer.REPLICA_SCHEDULER)
        retained = [(one.policy, one.name) for one in self.retention if one is not None]
        shared = [*chain.from_iterable(layers.values()), *self.beside, *retained]
        found = listeners_among([*shared, *own])
        # A replica's own scheduler is notified of the ends of that replica's steps only. If the scheduler listens to
        # nothing else, it gets no requests of other replicas.
        knows_one = listeners_among(own).listen_only_to_steps and not listeners_among(shared).across_replicas
        return structs.replace(found, across_replicas=not knows_one)

    @property
    def asks_listeners_each_step(self) -> bool:
        """True if a policy that listens to events may be called in every step even if no request waits.

        The prioritizer is not counted if each request's key depends only on the request and the time.
        """
        asked = [Layer.REPLICA_SCHEDULER]
        prioritizer: Any = self.prioritizer
        if prioritizer.key_motion not in (KeyMotion.STATIC, KeyMotion.PROGRESS, KeyMotion.TIME_LINEAR) or isinstance(
            prioritizer, GroupsRequests | PredictsSlack
        ):
            asked.append(Layer.REQUEST_PRIORITIZER)
        layers = [(one, self._layers[layer].name) for layer in asked for one in self._layers[layer].made]
        retained = [(one.policy, one.name) for one in self.retention if one is not None]
        return listeners_among([*layers, *retained]) != NOBODY

    def listeners_of(self, replica_id: int) -> Listeners:
        """Return the callbacks of the policies that are notified of events on a replica."""
        layers = (Layer.REQUEST_PRIORITIZER, Layer.REPLICASET_SCHEDULER)
        shared = [(one, self.name(layer)) for layer in layers for one in self._layers[layer].made]
        own = (self.schedulers[replica_id], self.scheduler_name(replica_id))
        one = self.retention[replica_id]
        retained = [] if one is None else [(one.policy, one.name)]
        return listeners_among([*shared, own, *self.beside, *retained])

    def pins(self, replica_id: int) -> Callable[[RequestView, float], float] | None:
        """Return the function by which a replica's retention policy pins content; None if the policy pins nothing.
        Given a request that ends on the replica, and the time, it returns the seconds to pin the request's content.
        """
        retained = self.retention[replica_id]
        if retained is None or not isinstance(retained.policy, PinsContent):
            return None
        policy, name = retained.policy, retained.name

        def pin_s(request: RequestView, now: float) -> float:
            try:
                return checked_seconds(policy.pin_s(request, now))
            except VajraError:
                raise
            except POLICY_EXCEPTIONS as error:
                raise PolicyError.caused_by(name, error, request_id=request.request_id) from error

        return pin_s


def slack_reader(prioritizer: RequestPrioritizer, name: str) -> SlackReader | None:
    """Return a reader of the slack that this prioritizer predicts; None if it predicts none."""
    return SlackReader(prioritizer, name) if isinstance(prioritizer, PredictsSlack) else None


def check_slack(prioritizer: RequestPrioritizer, name: str, schedulers: Iterable[tuple[str, ReplicaScheduler]]) -> None:
    """Raise `ConfigError` if a replica scheduler needs slack and the prioritizer predicts none."""
    if isinstance(prioritizer, PredictsSlack):
        return
    for scheduler_name, scheduler in schedulers:
        if traits_of(scheduler).needs_slack:
            message = f"{name!r} does not predict slack, which replica scheduler {scheduler_name!r} needs"
            allowed = "Allowed: a prioritizer with slack_s and slack_fraction, such as lrs or edf"
            raise ConfigError(Problem("scheduling.request_prioritizer", message, allowed))
