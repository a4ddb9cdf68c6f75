"""Hooks by which a plug-in package registers its parts; they are never called per step.

A package declares an entry point in the group ``vajra`` that names a module (or object) with hook implementations::

    [project.entry-points.vajra]
    my_package = "my_package"

and in that module::

    from vajra_py.contract import PolicySpec, hookimpl

    @hookimpl
    def vajra_policies() -> list[PolicySpec]: ...
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pluggy
from pydantic import BaseModel

from vajra_py.contract.admission import AdmissionPolicy, Scaler
from vajra_py.contract.context import PolicyConfig, PolicyContext
from vajra_py.contract.latency import LatencyModel, OutputLengthPredictor
from vajra_py.contract.observer import Observer
from vajra_py.contract.policies import Layer, SchedulingPolicy
from vajra_py.contract.retention import RetentionPolicy
from vajra_py.contract.routing import RoutingContext, RoutingPartKind

PROJECT = "vajra"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Makes one policy available by name. `build` receives parameters validated by `config`."""

    name: str
    layer: Layer
    config: type[PolicyConfig]
    build: Callable[[Any, PolicyContext], SchedulingPolicy]
    summary: str
    source: str = ""
    """Paper, section or system that the policy follows."""
    aliases: tuple[str, ...] = ()
    advice: str = ""
    """Advice in two sentences: `Use it where …. Not where …`."""


@dataclass(frozen=True, slots=True)
class PolicyAt:
    """Location of a `PolicySpec` that is imported on first use: a run imports only the policies that it uses."""

    name: str
    layer: Layer
    place: str
    """Module and variable of the `PolicySpec`, as `package.module:VARIABLE`; the variable defaults to `SPEC`."""
    aliases: tuple[str, ...] = ()

    def load(self) -> Any:
        """Import the module, and return the value of the variable."""
        module, _, variable = self.place.partition(":")
        return getattr(importlib.import_module(module), variable or "SPEC")


@dataclass(frozen=True, slots=True)
class AdmissionSpec:
    """Makes an admission policy available as `scheduling: {admission: {policy: name, params: …}}`.

    `build` receives parameters validated by `config`, and a context with the largest limits of all replicasets and the
    predictions of the first replicaset.
    """

    name: str
    config: type[PolicyConfig]
    build: Callable[[Any, PolicyContext], AdmissionPolicy]
    summary: str
    source: str = ""
    """Paper, section or system that the policy follows."""
    advice: str = ""
    """Advice in two sentences: `Use it where …. Not where …`."""


@dataclass(frozen=True, slots=True)
class ScalerSpec:
    """Makes a scaler available as `scheduling: {scaling: name}`. `build` receives parameters validated by `config`."""

    name: str
    config: type[PolicyConfig]
    build: Callable[[Any, PolicyContext], Scaler]
    summary: str
    source: str = ""
    """Paper, section or system that the scaler follows."""
    advice: str = ""
    """Advice in two sentences: `Use it where …. Not where …`."""


@dataclass(frozen=True, slots=True)
class RetentionSpec:
    """Makes a retention policy available as `scheduling: {retention: name}`.

    `build` receives parameters validated by `config` and the context of one replica; it is called for each replica, and
    for each memory tier (there, `limits.num_blocks` is the size of the tier).
    """

    name: str
    config: type[PolicyConfig]
    build: Callable[[Any, PolicyContext], RetentionPolicy]
    summary: str
    source: str = ""
    """Paper, section or system that the policy follows."""
    follows_release: bool = False
    """True if blocks are always evicted in the order in which they became idle; the device memory then follows this
    order itself, which is cheaper than calling `key`."""
    advice: str = ""
    """Advice in two sentences: `Use it where …. Not where …`."""


@dataclass(frozen=True, slots=True)
class RoutingPartSpec:
    """Makes a part of composable routers available by name. `build` receives parameters validated by `config`."""

    name: str
    kind: RoutingPartKind
    config: type[PolicyConfig]
    build: Callable[[Any, RoutingContext], Any]
    """Function that builds the part: an object with the methods of its kind, such as `ReplicaScorer`.

    A producer may be any object.
    """
    summary: str
    source: str = ""
    """Paper, section or system that the part follows."""
    advice: str = ""
    """Advice in two sentences: `Use it where …. Not where …`."""


AnyPolicySpec: TypeAlias = PolicySpec | AdmissionSpec | ScalerSpec | RetentionSpec | RoutingPartSpec
"""Spec of a policy of any kind, or of a routing part."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Named settings of a whole system: all three layers, options of the replica, and pools if there are any."""

    name: str
    summary: str
    source: str
    scheduling: Mapping[str, Any]
    """Contents of `scheduling:` in YAML, all three layers."""
    replica: Mapping[str, Any] = field(default_factory=dict)
    """Contents of `replica:` in YAML: batch limits, memory and prefix-cache options."""
    replicaset: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a replicaset in YAML: `pools`, `hand_off`, `links`. If a file sets `num_replicas`, this number is
    divided among the pools in proportion to their numbers of replicas in the preset."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """All keys of the preset, in the form of an experiment file."""
        return {"scheduling": self.scheduling, "replica": self.replica, **self.replicaset}


@dataclass(frozen=True, slots=True)
class LatencyModelSpec:
    """Makes a latency model available as `latency: {type: name, ...}`."""

    name: str
    config: type[BaseModel]
    build: Callable[[Any], LatencyModel]
    summary: str


@dataclass(frozen=True, slots=True)
class OutputLengthSpec:
    """Makes an output-length predictor available by name.

    `build` receives the parameters, a function that returns random streams by name, and a mapping from request ids to
    true output lengths in tokens. The mapping holds every request whose length is known in advance: all in simulations
    and in experiments on the engine, none on servers. Realistic predictors do not read it.
    """

    name: str
    config: type[BaseModel]
    build: Callable[[Any, Callable[[str], Any], Mapping[str, int]], OutputLengthPredictor]
    summary: str


@dataclass(frozen=True, slots=True)
class ObserverSpec:
    """Makes an observer available by name; one instance is built per run."""

    name: str
    config: type[BaseModel]
    build: Callable[[Any], Observer]
    summary: str


@hookspec
def vajra_policies() -> Iterable[PolicySpec | PolicyAt]:  # type: ignore[empty-body]
    """Return the policies that this package offers. Called once; must not build anything expensive."""


@hookspec
def vajra_admission_policies() -> Iterable[AdmissionSpec]:  # type: ignore[empty-body]
    """Return the admission policies that this package offers. Called once; must not build anything expensive."""


@hookspec
def vajra_routing_parts() -> Iterable[RoutingPartSpec]:  # type: ignore[empty-body]
    """Return the parts of composable routers that this package offers. Called when a router or a listing needs them."""


@hookspec
def vajra_presets() -> Iterable[Preset]:  # type: ignore[empty-body]
    """Return the presets that this package offers."""


@hookspec
def vajra_latency_models() -> Iterable[LatencyModelSpec]:  # type: ignore[empty-body]
    """Return the latency models that this package offers."""


@hookspec
def vajra_output_length_predictors() -> Iterable[OutputLengthSpec]:  # type: ignore[empty-body]
    """Return the output-length predictors that this package offers."""


@hookspec
def vajra_scalers() -> Iterable[ScalerSpec]:  # type: ignore[empty-body]
    """Return the scalers that this package offers."""


@hookspec
def vajra_retention_policies() -> Iterable[RetentionSpec]:  # type: ignore[empty-body]
    """Return the retention policies that this package offers."""


@hookspec
def vajra_observers() -> Iterable[ObserverSpec]:  # type: ignore[empty-body]
    """Return the observers that this package offers."""
