"""Policies of a replicaset, and how others are built in their place.

One maker a replicaset, kept while it serves, so that a policy that comes later gets what the first ones got: sizes,
predictions, random streams by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from vajra_py.config import PolicyChoice
from vajra_py.contract import (
    Layer,
    PrefillTime,
    ReplicaLimits,
    ReplicaScheduler,
    ReplicasetScheduler,
    RequestPrioritizer,
    SharedState,
)
from vajra_py.contract.policies import SoloChunkSize, solo_chunk_size_of
from vajra_py.runtime.queues import RequestQueue, make_queue
from vajra_py.runtime.requests.listeners import Listeners, listeners_among

MakePolicy = Callable[[Layer, PolicyChoice], Any]
"""Builds one policy and checks its shape; raises what `vajra_py.plugins.build_policy` raises."""


class LatePrefillTime:
    """`PrefillTime` that is complete once the replica scheduler exists, whose chunks it predicts."""

    table: PrefillTime | None = None

    def total_s(self, num_prompt_tokens: int) -> float:
        """Seconds for the whole prompt."""
        assert self.table is not None
        return self.table.total_s(num_prompt_tokens)

    def remaining_s(self, num_prompt_tokens: int, num_done_tokens: int) -> float:
        """Seconds for what is left of it."""
        assert self.table is not None
        return self.table.remaining_s(num_prompt_tokens, num_done_tokens)


class Policies:
    """The policies of one replicaset, by layer, with their listeners."""

    def __init__(
        self,
        choices: Mapping[Layer, PolicyChoice],
        num_replicas: int,
        make: MakePolicy,
        prefill_time: LatePrefillTime,
        predict: Callable[[ReplicaScheduler], PrefillTime],
    ) -> None:
        self.choices = dict(choices)
        self._num_replicas = num_replicas
        self._make = make
        self.prefill_time = prefill_time
        self._predict = predict
        self.shared = SharedState()
        """What these policies share; policies that are made later find it as it is."""
        self._made: dict[Layer, Sequence[Any]] = {layer: self.make(layer, choices[layer]) for layer in Layer}
        prefill_time.table = self.predict(self.schedulers)

    def make(self, layer: Layer, choice: PolicyChoice) -> Sequence[Any]:
        """New policies of a layer: one for each replica in the last, else one. They are not in force."""
        count = self._num_replicas if layer is Layer.REPLICA_SCHEDULER else 1
        return [self._make(layer, choice) for _ in range(count)]

    def predict(self, schedulers: Sequence[ReplicaScheduler]) -> PrefillTime:
        """How long prompts take in the chunks of these schedulers."""
        return self._predict(schedulers[0])

    def put(self, layer: Layer, choice: PolicyChoice, policies: Sequence[Any]) -> None:
        """These are in force from now on."""
        self.choices[layer], self._made[layer] = choice, policies

    # What is in force

    @property
    def prioritizer(self) -> RequestPrioritizer:
        """Of every queue."""
        return cast(RequestPrioritizer, self._made[Layer.REQUEST_PRIORITIZER][0])

    @property
    def replicaset_scheduler(self) -> ReplicasetScheduler:
        """Of the replicaset."""
        return cast(ReplicasetScheduler, self._made[Layer.REPLICASET_SCHEDULER][0])

    @property
    def schedulers(self) -> Sequence[ReplicaScheduler]:
        """Of each replica."""
        return self._made[Layer.REPLICA_SCHEDULER]

    def name(self, layer: Layer) -> str:
        """What errors call the layer's policy."""
        return self.choices[layer].policy

    def new_queue(self) -> RequestQueue:
        """An empty queue in the prioritizer's order."""
        return make_queue(self.prioritizer, self.name(Layer.REQUEST_PRIORITIZER))

    # Listeners

    def listeners(self) -> Listeners:
        """Everyone who is told of arrivals and departures."""
        return listeners_among((one, self.name(layer)) for layer in Layer for one in self._made[layer])

    def listeners_of(self, replica_id: int) -> Listeners:
        """Who is told of what happens on a replica."""
        own = [(self._made[layer][0], self.name(layer)) for layer in Layer if layer is not Layer.REPLICA_SCHEDULER]
        return listeners_among([*own, (self.schedulers[replica_id], self.name(Layer.REPLICA_SCHEDULER))])


def solo_chunk_rule(scheduler: ReplicaScheduler, limits: ReplicaLimits) -> SoloChunkSize:
    """How a replica scheduler chunks a lone prompt: as it says, else the step's token budget, else the whole prompt."""
    budget = limits.max_batch_tokens
    return solo_chunk_size_of(scheduler) or (
        lambda done, remaining: remaining if budget is None else min(remaining, budget)
    )
