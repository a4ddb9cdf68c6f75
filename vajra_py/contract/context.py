"""Context that a policy is built with: services of the mechanism, and the parameters' base model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from vajra_py.contract.latency import LatencyModel, OutputLengthPredictor, PrefillTime
from vajra_py.contract.requests import RequestView
from vajra_py.contract.views import ReplicaLimits

if TYPE_CHECKING:
    from vajra_py.contract.routing import RoutingContext, RoutingPartChoice


class PolicyConfig(BaseModel):
    """Base of every policy's parameters: frozen, nothing extra, defaults checked. Put units into field names."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_default=True, allow_inf_nan=False)


class RandomStream(Protocol):
    """A seeded source of randomness; numpy's Generator is one."""

    def random(self) -> float:
        """Uniform in [0, 1)."""

    def integers(self, low: int, high: int) -> int:
        """Uniform over low .. high - 1."""


class EmitFigure(Protocol):
    """Records a figure of a policy's own: a counter, a level, a prediction that a paper wants to plot beside TTFT."""

    def __call__(self, name: str, value: float, now: float, request: RequestView | None = None) -> None:
        """Record `value` under `name` (lower-case letters, digits, underscores) at `now`, of one request or of none.

        Kept by runs that write results, in `emitted.parquet`; elsewhere nothing happens. Steps that a simulator repeats without
        a call (`SchedulerTraits.repeats_decodes`) emit nothing. Raises `ValueError` for another name or a number that is not finite.
        """


def emit_nothing(name: str, value: float, now: float, request: RequestView | None = None) -> None:
    """Record nothing; the default of `PolicyContext.emit`."""


class WakeUps(Protocol):
    """Wakes the policy at times that it sets: for batching windows, periodic rebalancing, planners.

    Everything else of that tick happens first. Then `on_wake` is called, where the policy has it (`HandlesWakes`), and its layer is
    called again: a replica scheduler for its replica's next step, unless one is in flight; the other two for all idle replicas. A
    wake-up alone does not keep a run going: it ends when no request is left.
    """

    def at(self, time_s: float, key: str = "") -> None:
        """Wake this policy at `time_s`, seconds on the run's clock (now, if that has passed).

        A policy has one wake-up under each key; setting it again moves it. Raises `ValueError` for a time that is not finite.
        """

    def cancel(self, key: str = "") -> None:
        """Forget the wake-up of this key, if there is one."""


class NoWakeUps:
    """The default of `PolicyContext.wake`: outside a run no policy is woken."""

    def at(self, time_s: float, key: str = "") -> None:
        """Do nothing."""

    def cancel(self, key: str = "") -> None:
        """Do nothing."""


class BuildRoutingPart(Protocol):
    """Builds parts of composable routers."""

    def __call__(self, choice: RoutingPartChoice, context: RoutingContext) -> Any:
        """Build the installed part that `choice` names, from its validated parameters. Raises like building a policy."""


def no_routing_parts(choice: RoutingPartChoice, context: RoutingContext) -> Any:
    """Refuse; the default of `PolicyContext.build_part`, for contexts that were put together by hand."""
    raise ValueError(f"there are no routing parts here (asked for {choice.name!r})")


T = TypeVar("T")


class SharedState:
    """Objects that the policies of one replicaset share, one of each kind: counters of tenants, a router's own prefix tree.

    An object is made when it is first requested. Each replicaset has its own; a policy that replaces another finds its objects.
    """

    def __init__(self) -> None:
        self._objects: dict[Callable[[], Any], Any] = {}

    def get(self, kind: Callable[[], T]) -> T:
        """The replicaset's object of this kind (a class, or a function without arguments), made by calling it the first time."""
        if kind not in self._objects:
            self._objects[kind] = kind()
        made: T = self._objects[kind]
        return made

    @property
    def is_empty(self) -> bool:
        """True if no object was requested yet."""
        return not self._objects

    def clear(self) -> None:
        """Forget everything; for the mechanism, when all policies of a replicaset are made anew."""
        self._objects.clear()


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Services for one policy object. Policies of one replicaset share all services except `emit`, which is each policy's own.

    A replica scheduler has limits and latency model of its replica; where replicas differ, the other layers have the largest of each limit.
    """

    limits: ReplicaLimits
    num_replicas: int
    latency: LatencyModel
    prefill_time: PrefillTime
    output_lengths: OutputLengthPredictor
    random_stream: Callable[[str], RandomStream]
    """A stream by name: the same name gives the same numbers, independent of other streams."""
    shared: SharedState = field(default_factory=SharedState)
    """State that the policies of the replicaset share."""
    emit: EmitFigure = emit_nothing
    """Records a figure of the policy's own."""
    wake: WakeUps = field(default_factory=NoWakeUps)
    """Wakes the policy at a time."""
    build_part: BuildRoutingPart = no_routing_parts
    """Builds the routing parts that a composable router's parameters name."""
