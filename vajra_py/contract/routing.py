"""Protocols of the parts of composable routers: producers of figures, filters, scorers, pickers, deciders.

The terms are those of llm-d's endpoint picker. A composed replicaset scheduler (`endpoint_picker`) calls its parts in
this order: every filter narrows the candidates, every scorer rates the remaining ones from 0 to 1, and the picker
selects one by the weighted sums of the scores. Packages register parts with `vajra_routing_parts`; users select them by
name in a policy's parameters. Parts have no base class.

Any part may also listen to requests (`ListensToRequests`), caches (`ListensToCaches`) and placements
(`LearnsPlacements`); the router forwards all of these callbacks, except that it reports every step by `on_step_end`,
never by `on_step_run`.
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
    """Kind of a part; the values are the keys that select a part in YAML."""

    PRODUCER = "producer"
    """Provides figures to other parts, such as the number of blocks of a prompt that each replica has cached."""
    FILTER = "filter"
    SCORER = "scorer"
    PICKER = "picker"
    DECIDER = "decider"
    """Decides whether the prompt is computed on another replica than the one that decodes."""


class Scores(Protocol):
    """A score for each replica, in the order of the replicas: a list, a tuple or a numpy array."""

    def __len__(self) -> int:
        """Return the number of replicas."""

    def __iter__(self) -> Iterator[float | None]:
        """Return an iterator over the scores; None means that there is no score for the replica, and counts as 0."""


@runtime_checkable
class ReplicaFilter(Protocol):
    """Narrows the set of candidate replicas."""

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Return the replicas that may serve the request, in the given order; `replicas` itself if all may."""


@runtime_checkable
class LeavesOutPools(Protocol):
    """Optional method of a filter or replicaset scheduler whose parameters may exclude a whole pool permanently.

    A pool that no request can ever reach is an error in the settings, reported when the settings are read.
    """

    def may_take(self, pool: str, role: str) -> bool:
        """Return True if requests may be sent to replicas of this pool; `role` is the value of its `PoolRole`."""


@runtime_checkable
class ReplicaScorer(Protocol):
    """Rates the candidate replicas. Equal states give equal scores."""

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Scores:
        """Return a score for each of `replicas`, from 0 (worst) to 1 (best).

        The router clamps scores outside this range, and rejects NaN.
        """


@runtime_checkable
class ReplicaPicker(Protocol):
    """Selects one of the candidate replicas."""

    def pick(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], scores: Sequence[float], now: float
    ) -> ReplicaId:
        """Return the id of one of `replicas` (never empty); `scores` holds the weighted sum of each replica's scores,
        in the same order.
        """


@runtime_checkable
class DisaggregationDecider(Protocol):
    """Decides whether a request is disaggregated, after its decode replica was chosen."""

    def disaggregates(self, request: RequestView, decode: ReplicaLoadView, now: float) -> bool:
        """Return True if another replica is to compute the prompt, False if `decode` computes it itself."""


@runtime_checkable
class LearnsPlacements(Protocol):
    """Optional callback of any part after the router's choice, like llm-d's PreRequest plug-ins."""

    def on_placement(self, request: RequestView, placements: Mapping[str, ReplicaLoadView], now: float) -> None:
        """Called after the request was placed; `placements` holds replicas by profile ("default", "prefill", "decode").

        Called again, with the newly chosen profile, if the request is placed again. A part is notified before the
        producers that it reads, so their figures do not include this placement yet.
        """


# Figures of producers


@runtime_checkable
class PrefixMatches(Protocol):
    """Figures of a producer that knows or estimates the prefixes that replicas have cached."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    def num_blocks(self, request: RequestView) -> int:
        """Return the number of full blocks of the prompt."""

    def matched_blocks(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Return for each replica the number of leading blocks of the prompt in its cache."""


@runtime_checkable
class InFlightLoads(Protocol):
    """Figures of a producer that counts requests in flight (sent by the router and not ended) and their tokens."""

    def num_requests(self, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Return the number of requests in flight at each replica."""

    def num_tokens(self, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Return the number of tokens in flight at each replica: uncached prompt tokens of requests that have not
        generated a token yet.
        """

    def request_tokens(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> Sequence[int]:
        """Return the number of tokens in flight that the request would add at each replica."""


@dataclass(frozen=True, slots=True)
class PredictedLatency:
    """Prediction for one request on one replica, seconds."""

    ttft_s: float
    tpot_s: float
    ttft_headroom_s: float
    """TTFT SLO minus predicted TTFT, seconds; a missing SLO counts as 0, so that the headroom is negative."""
    tpot_headroom_s: float
    """TPOT SLO minus predicted TPOT, seconds; 0 without an SLO."""
    num_dispatched: int
    """Number of requests that run or wait on the replica."""

    @property
    def is_met(self) -> bool:
        """True if neither headroom is negative; always False without a TTFT SLO."""
        return self.ttft_headroom_s >= 0 and self.tpot_headroom_s >= 0


@runtime_checkable
class PredictsLatencies(Protocol):
    """Figures of a producer that predicts latencies."""

    def latencies(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> Sequence[PredictedLatency | None]:
        """Return the prediction for each replica; None for a replica without one."""


# Choice and construction of parts


class RoutingPartChoice(PolicyConfig):
    """Routing part selected by name, with its parameters; in YAML the name alone is enough.

    A policy may have fields of this type anywhere in its parameters. When a file is read, the name is looked up among
    the installed parts, and the parameters are checked against the part's own model.
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
    """Producer selected by name; a producer that is not listed is built with its defaults when a part requests it."""

    kind = RoutingPartKind.PRODUCER
    producer: str = Field(description="Name of a producer.")


class FilterChoice(RoutingPartChoice):
    """Filter selected by name."""

    kind = RoutingPartKind.FILTER
    filter: str = Field(description="Name of a filter.")


class ScorerChoice(RoutingPartChoice):
    """Scorer selected by name, with its weight in the sum of the scores."""

    kind = RoutingPartKind.SCORER
    scorer: str = Field(description="Name of a scorer.")
    weight: float = Field(1.0, description="Factor of its scores; weights are not normalised.")


class PickerChoice(RoutingPartChoice):
    """Picker selected by name."""

    kind = RoutingPartKind.PICKER
    picker: str = Field(description="Name of a picker.")


class DeciderChoice(RoutingPartChoice):
    """Decider selected by name."""

    kind = RoutingPartKind.DECIDER
    decider: str = Field(description="Name of a decider.")


PART_CHOICES: tuple[type[RoutingPartChoice], ...] = (
    ProducerChoice,
    FilterChoice,
    ScorerChoice,
    PickerChoice,
    DeciderChoice,
)
"""Choice class of each kind of part."""


class GetProducer(Protocol):
    """Looks up the producers of a router."""

    def __call__(self, name: str) -> Any:
        """Return the router's producer of this name; build it with its defaults if the settings do not list it."""


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """Services for one part: the services of its router, and the router's producers."""

    policy: PolicyContext
    producer: GetProducer
