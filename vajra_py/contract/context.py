"""Services of the mechanism for policies (`PolicyContext`), and the base model of policies' parameters."""

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
    """Base of every policy's parameters: frozen, without extra keys, with validated defaults.

    Names of parameters include the unit, such as `timeout_s`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_default=True, allow_inf_nan=False)


class RandomStream(Protocol):
    """A seeded source of randomness; numpy's Generator is one."""

    def random(self) -> float:
        """Draw a number uniformly from [0, 1)."""

    def integers(self, low: int, high: int) -> int:
        """Draw an integer uniformly from [low, high)."""


class EmitFigure(Protocol):
    """Records a figure that the policy computes, such as a counter, a level or a prediction, for plots."""

    def __call__(self, name: str, value: float, now: float, request: RequestView | None = None) -> None:
        """Record `value` under `name` (lower-case letters, digits, underscores) at `now`, optionally for a request.

        A run that writes results stores the value in `emitted.parquet`; other runs drop it. Steps that a simulator
        repeats without calling the policy (`SchedulerTraits.repeats_decodes`) emit nothing. Raises `ValueError` for an
        invalid name, a value that is not finite, or a `request` that is no request.
        """


def emit_nothing(name: str, value: float, now: float, request: RequestView | None = None) -> None:
    """Record nothing; the default of `PolicyContext.emit`."""


class WakeUps(Protocol):
    """Wakes the policy at times that it sets, such as for batching windows, periodic rebalancing or planning.

    Other events at the same time, except those of scalers, happen first. Then `on_wake` is called if the policy has it
    (`HandlesWakes`), and steps are formed. A wake-up of a replica scheduler forms a step on its replica unless a step
    is in flight; a wake-up of another policy forms steps on all idle replicas. Wake-ups do not keep a run alive: it
    ends when no request is left.
    """

    def at(self, time_s: float, key: str = "") -> None:
        """Wake this policy at `time_s`, seconds on the run's clock; a time in the past means now.

        A policy has one wake-up per key; a further call with the same key moves it. Raises `ValueError` for a time that
        is not finite.
        """

    def cancel(self, key: str = "") -> None:
        """Remove the wake-up of this key, if there is one."""


class NoWakeUps:
    """Default of `PolicyContext.wake`; outside a run, no policy is woken."""

    def at(self, time_s: float, key: str = "") -> None:
        """Do nothing."""

    def cancel(self, key: str = "") -> None:
        """Do nothing."""


class BuildRoutingPart(Protocol):
    """Builds parts of composable routers."""

    def __call__(self, choice: RoutingPartChoice, context: RoutingContext) -> Any:
        """Build the installed part that `choice` names, from its validated parameters.

        Raises the same errors as building a policy.
        """


def no_routing_parts(choice: RoutingPartChoice, context: RoutingContext) -> Any:
    """Raise an error; the default of `PolicyContext.build_part`, for contexts created outside the framework."""
    raise ValueError(f"routing parts are not available to this policy (requested {choice.name!r})")


T = TypeVar("T")


class SharedState:
    """Objects that the policies of one replicaset share, such as counters of tenants or a prefix tree.

    There is one object of each kind, created on first use. Replicasets do not share objects. A policy that replaces
    another policy gets the same objects.
    """

    def __init__(self) -> None:
        self._objects: dict[Callable[[], Any], Any] = {}

    def get(self, kind: Callable[[], T]) -> T:
        """Return the replicaset's object of this kind, created by `kind` (a class or function) on first use."""
        if kind not in self._objects:
            self._objects[kind] = kind()
        made: T = self._objects[kind]
        return made

    @property
    def is_empty(self) -> bool:
        """True if no object was requested yet."""
        return not self._objects

    def clear(self) -> None:
        """Drop all objects; called by the mechanism before all policies of a replicaset are rebuilt."""
        self._objects.clear()


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Services for one policy object. `emit` and `wake` belong to this policy alone.

    A replica scheduler or retention policy gets the limits and the latency model of its own replica. Other policies get
    the largest value of each limit over all replicas.
    """

    limits: ReplicaLimits
    num_replicas: int
    latency: LatencyModel
    prefill_time: PrefillTime
    output_lengths: OutputLengthPredictor
    random_stream: Callable[[str], RandomStream]
    """Function that returns the random stream of a name; equal names give equal numbers, regardless of other streams."""
    shared: SharedState = field(default_factory=SharedState)
    """State that the policies of the replicaset share."""
    emit: EmitFigure = emit_nothing
    """Records a figure that the policy computes."""
    wake: WakeUps = field(default_factory=NoWakeUps)
    """Wakes the policy at times that it sets."""
    build_part: BuildRoutingPart = no_routing_parts
    """Function that builds a routing part named in the parameters of a composable router."""
