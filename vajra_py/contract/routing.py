"""Parts of which a router is composed: producers of figures, filters, scorers, pickers, and deciders on disaggregation.

The vocabulary is that of llm-d's endpoint picker. A replicaset scheduler that is composed of parts (`endpoint_picker`) asks them in
this order: every filter narrows the candidates, every scorer rates those that are left from 0 to 1, the weighted sum decides which of
them the picker takes. Parts are registered by `vajra_routing_parts`, are chosen by name in a policy's parameters, and have no base class.

Any part may also listen to requests (`ListensToRequests`) and learn of placements (`LearnsPlacements`); the router passes both on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, runtime_checkable

from pydantic import Field, model_validator

from vajra_py.contract.context import PolicyConfig, PolicyContext
from vajra_py.contract.requests import ReplicaId, RequestView
from vajra_py.contract.views import ReplicaLoadView


class RoutingPartKind(Enum):
    """Kind of a part; the values are the keys by which a choice names it in YAML."""

    PRODUCER = "producer"
    """Keeps figures for other parts, such as prefixes that were sent to each replica."""
    FILTER = "filter"
    SCORER = "scorer"
    PICKER = "picker"
    DECIDER = "decider"
    """Decides whether a prompt is computed apart from its decode replica."""


class Scores(Protocol):
    """A score for each replica, in their order: a list, a tuple or a numpy array."""

    def __len__(self) -> int:
        """Number of replicas."""

    def __iter__(self) -> Iterator[float | None]:
        """The scores; None: this scorer has no score for the replica, which counts as 0."""


@runtime_checkable
class ReplicaFilter(Protocol):
    """Narrows the candidates."""

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Return the replicas that may take the request, in their order; `replicas` itself where all may."""


@runtime_checkable
class LeavesOutPools(Protocol):
    """Optional method of a filter, and of a replicaset scheduler, whose parameters may leave out all replicas of a pool for good.

    A pool to which no request can ever come is a mistake in the settings, and is refused when they are read.
    """

    def may_take(self, pool: str, role: str) -> bool:
        """Return False if no request is ever sent to replicas of this pool, whatever their state; `role` is that of the pool."""


@runtime_checkable
class ReplicaScorer(Protocol):
    """Rates the candidates. Equal states give equal scores."""

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Scores:
        """A score for each of `replicas`; 1 is best, 0 worst. The router clamps what is beyond, and refuses NaN."""


@runtime_checkable
class ReplicaPicker(Protocol):
    """Takes one of the candidates."""

    def pick(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], scores: Sequence[float], now: float
    ) -> ReplicaId:
        """Id of one of `replicas`, which are not empty; `scores` are their weighted sums, in their order."""


@runtime_checkable
class DisaggregationDecider(Protocol):
    """Decides on disaggregation of one request when its decode replica has been chosen."""

    def disaggregates(self, request: RequestView, decode: ReplicaLoadView, now: float) -> bool:
        """Return True if another replica is to compute the prompt, False if `decode` computes it itself."""


@runtime_checkable
class LearnsPlacements(Protocol):
    """Optional method of any part: learns what the router has chosen, as llm-d's PreRequest plug-ins do."""

    def on_placement(self, request: RequestView, placements: Mapping[str, ReplicaLoadView], now: float) -> None:
        """The request has just been placed; by profile ("default", "prefill", "decode") the replica that was chosen.

        Called again, with the profile that was chosen anew, if the request is placed another time. A part is notified before the
        producers that it reads.
        """


# Figures of producers


@runtime_checkable
class PrefixMatches(Protocol):
    """Figures of a producer that has, or estimates, which prefixes the replicas have cached."""

    @property
    def block_size(self) -> int:
        """Tokens of one of its blocks."""

    def num_blocks(self, request: RequestView) -> int:
        """Full blocks of the prompt."""

    def matched_blocks(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Leading blocks of the prompt that each replica has."""


@runtime_checkable
class InFlightLoads(Protocol):
    """Figures of a producer that counts what the router has sent and what has not come back."""

    def num_requests(self, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Requests in flight at each replica."""

    def num_tokens(self, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Tokens in flight at each replica: prompt tokens that were not cached, until the first token comes."""

    def request_tokens(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Tokens that the request would add at each replica."""


@dataclass(frozen=True, slots=True)
class PredictedLatency:
    """Prediction for one request on one replica, seconds."""

    ttft_s: float
    tpot_s: float
    ttft_headroom_s: float
    """Promised time to first token minus the prediction; minus the prediction where nothing is promised."""
    tpot_headroom_s: float
    num_dispatched: int
    """Requests that the replica has already."""

    @property
    def is_met(self) -> bool:
        """True if both promises are kept."""
        return self.ttft_headroom_s >= 0 and self.tpot_headroom_s >= 0


@runtime_checkable
class PredictsLatencies(Protocol):
    """Figures of a producer that predicts latencies."""

    def latencies(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> Sequence[PredictedLatency | None]:
        """The prediction for each replica; None where there is none."""


# How parts are chosen and built


class RoutingPartChoice(PolicyConfig):
    """A part by name, with its parameters; in YAML also the name alone. A policy may have such fields anywhere in its parameters.

    When a file is read, the name is looked up among the installed parts, and the parameters are checked against the part's own model.
    """

    kind: ClassVar[RoutingPartKind]

    params: dict[str, Any] = Field(default_factory=dict, description="The part's parameters.")

    @model_validator(mode="before")
    @classmethod
    def _by_name_alone(cls, given: Any) -> Any:
        return {cls.kind.value: given} if isinstance(given, str) else given

    @property
    def name(self) -> str:
        """Name of the part."""
        return str(getattr(self, self.kind.value))


class ProducerChoice(RoutingPartChoice):
    """Settings of a producer; those that are not set are made with their defaults when a part asks for them."""

    kind = RoutingPartKind.PRODUCER
    producer: str = Field(description="Name of a producer.")


class FilterChoice(RoutingPartChoice):
    """One of the filters."""

    kind = RoutingPartKind.FILTER
    filter: str = Field(description="Name of a filter.")


class ScorerChoice(RoutingPartChoice):
    """One of the scorers, with its weight in the sum."""

    kind = RoutingPartKind.SCORER
    scorer: str = Field(description="Name of a scorer.")
    weight: float = Field(1.0, description="Factor of its scores; weights are not normalised.")


class PickerChoice(RoutingPartChoice):
    """The picker."""

    kind = RoutingPartKind.PICKER
    picker: str = Field(description="Name of a picker.")


class DeciderChoice(RoutingPartChoice):
    """The decider."""

    kind = RoutingPartKind.DECIDER
    decider: str = Field(description="Name of a decider.")


PART_CHOICES: tuple[type[RoutingPartChoice], ...] = (
    ProducerChoice,
    FilterChoice,
    ScorerChoice,
    PickerChoice,
    DeciderChoice,
)
"""The choice of each kind."""


class GetProducer(Protocol):
    """Looks up the producers of a router."""

    def __call__(self, name: str) -> Any:
        """The router's producer of this name, made with its defaults where the settings do not mention it."""


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """Services for one part: those of its router, and the router's producers."""

    policy: PolicyContext
    producer: GetProducer
