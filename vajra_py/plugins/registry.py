"""Registry of installed policies, routing parts, presets, latency models, length predictors and observers.

A registry is read-only. Policies and presets are checked when the registry is built. Policies that are imported on
demand (`PolicyAt`), routing parts, latency models, output-length predictors and observers are checked on first use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct, structs
from pydantic import BaseModel

from vajra_py.contract import Layer, PolicyConfig, PolicySpec, RoutingPartKind, RoutingPartSpec
from vajra_py.contract.hookspecs import (
    AdmissionSpec,
    AnyPolicySpec,
    LatencyModelSpec,
    ObserverSpec,
    OutputLengthSpec,
    PolicyAt,
    Preset,
    RetentionSpec,
    ScalerSpec,
)
from vajra_py.errors import PluginError, UnknownNameError

SpecT = TypeVar(
    "SpecT",
    PolicySpec,
    PolicyAt,
    AdmissionSpec,
    ScalerSpec,
    RetentionSpec,
    RoutingPartSpec,
    Preset,
    LatencyModelSpec,
    OutputLengthSpec,
    ObserverSpec,
)
OtherT = TypeVar("OtherT", AdmissionSpec, ScalerSpec, RetentionSpec, RoutingPartSpec)
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_.\-]*")
DISABLE_VARIABLE = "VAJRA_DISABLE_PLUGINS"
"""Environment variable: names of entry points or packages to leave out, separated by commas."""


class PluginSource(Struct, frozen=True, order=True):
    """Origin of an offer: an entry point of a package at a version."""

    package: str
    """Name of the distribution, as used by pip."""
    version: str
    entry_point: str
    code: str = ""
    """Digest of the package's Python source when the plug-in was loaded; empty for this project's own."""

    def __str__(self) -> str:
        """Return the plug-in's name for error messages."""
        return f"{self.entry_point!r} of {self.package} {self.version}"


class Offer(Struct, Generic[SpecT], frozen=True):
    """Named object offered by a plug-in."""

    spec: SpecT
    source: PluginSource

    @property
    def package(self) -> str:
        """Distribution that provides the offer."""
        return self.source.package

    @property
    def version(self) -> str:
        """Version of that distribution."""
        return self.source.version


class Kind(Struct, Generic[SpecT], frozen=True):
    """Kind of policies that belong to no layer, or of parts of a policy.

    Attributes:
        key: key under `scheduling:` that selects a policy of this kind; empty for parts, which are named in a policy's
            parameters.
        noun: term for a policy or part of this kind in messages.
        hook: hook by which plug-ins offer policies or parts of this kind.
        spec: class of their specs.
    """

    key: str
    noun: str
    hook: str
    spec: type[SpecT]

    def __str__(self) -> str:
        """Return the noun with its indefinite article."""
        return _a(self.noun)


OfferT = TypeVar("OfferT", bound=Offer[Any])

ADMISSION = Kind("admission", "admission policy", "vajra_admission_policies", AdmissionSpec)
SCALER = Kind("scaling", "scaler", "vajra_scalers", ScalerSpec)
RETENTION = Kind("retention", "retention policy", "vajra_retention_policies", RetentionSpec)
ROUTING_PART = Kind("", "routing part", "vajra_routing_parts", RoutingPartSpec)
_OTHERS = (AdmissionSpec, ScalerSpec, RetentionSpec, RoutingPartSpec)

OfferBeside: TypeAlias = Offer[AdmissionSpec] | Offer[ScalerSpec] | Offer[RetentionSpec]
"""Offer of a policy that belongs to no layer: of admission, scaling or retention."""
OffersBeside: TypeAlias = (
    Mapping[str, Offer[AdmissionSpec]] | Mapping[str, Offer[ScalerSpec]] | Mapping[str, Offer[RetentionSpec]]
)
"""Offers of one kind of policy that belongs to no layer, by name."""
AnyOffer: TypeAlias = Offer[PolicySpec] | OfferBeside | Offer[RoutingPartSpec]
"""Offer of a policy of any kind, or of a routing part."""
OfferOfPolicy: TypeAlias = Offer[PolicySpec] | Offer[PolicyAt]
Claims: TypeAlias = Iterable[tuple[PluginSource, object]]
"""Pairs of a plug-in and one of the values that its hook returned."""


class Registry(Struct, frozen=True, eq=False, dict=True):
    """Offers of the installed plug-ins, by name.

    `lazy` is a function that calls the hook of a given name on every plug-in and returns the offers. It is called at
    most once for each kind of offer, on first use.
    """

    plugins: tuple[PluginSource, ...]
    policy_claims: Sequence[tuple[PluginSource, object]]
    preset_claims: Sequence[tuple[PluginSource, object]]
    lazy: Callable[[str], Claims]
    given_others: Sequence[tuple[PluginSource, object]] = ()
    """Further policies of admission, scaling and retention, and routing parts, that no installed package provides."""

    def __post_init__(self) -> None:
        """Check policies and presets, which are always needed."""
        _ = self._names, self.presets

    def with_policies(self, specs: Iterable[AnyPolicySpec]) -> Registry:
        """Return a copy with additional policies and routing parts that no installed package provides.

        Raises `PluginError` for a broken spec or a name that is taken. For policies that belong to no layer and for
        routing parts, the error is raised on first use.
        """
        given = [(PluginSource(_module_of(spec), "not installed", "policies="), spec) for spec in specs]
        others = [one for one in given if isinstance(one[1], _OTHERS)]
        policies = [one for one in given if not isinstance(one[1], _OTHERS)]
        return structs.replace(
            self,
            policy_claims=[*self.policy_claims, *policies],
            given_others=[*self.given_others, *others],
        )

    @cached_property
    def _policies(self) -> Mapping[Layer, _Policies]:
        offers = [_policy_offer(source, claim) for source, claim in self.policy_claims]
        return {layer: _Policies(layer, [offer for offer in offers if offer.spec.layer is layer]) for layer in Layer}

    @cached_property
    def _names(self) -> Mapping[Layer, Mapping[str, OfferOfPolicy]]:
        """Policies by layer and by name or alias."""
        return {layer: self._policies[layer].with_aliases() for layer in Layer}

    def policies(self, layer: Layer) -> Mapping[str, Offer[PolicySpec]]:
        """Return the layer's policies by name, sorted; aliases are not listed."""
        return self._policies[layer]

    def policy(self, layer: Layer, name: str) -> Offer[PolicySpec]:
        """Return the layer's policy of this name or alias; raises `UnknownNameError`."""
        found = self._names[layer].get(name)
        if found is None:
            raise UnknownNameError(kind_of(layer), name, self.policy_names(layer))
        return self._policies[layer][found.spec.name]

    def policy_names(self, layer: Layer) -> tuple[str, ...]:
        """Return every name that `policy` accepts in this layer, including aliases, sorted."""
        return tuple(sorted(self._names[layer]))

    def find_policies(self, name: str) -> tuple[Offer[PolicySpec], ...]:
        """Return the policies of this name or alias in any layer, in layer order; raises `UnknownNameError`."""
        found = tuple(self.policy(layer, name) for layer in Layer if name in self._names[layer])
        if not found:
            names = {known for layer in Layer for known in self.policy_names(layer)}
            raise UnknownNameError("policy", name, names)
        return found

    @cached_property
    def admission_policies(self) -> Mapping[str, Offer[AdmissionSpec]]:
        """Admission policies, by their name in `scheduling: {admission: …}`."""
        return _by_name(self._others(ADMISSION), ADMISSION.noun)

    @cached_property
    def scalers(self) -> Mapping[str, Offer[ScalerSpec]]:
        """Scalers, by their name in `scheduling: {scaling: …}`."""
        return _by_name(self._others(SCALER), SCALER.noun)

    @cached_property
    def retention_policies(self) -> Mapping[str, Offer[RetentionSpec]]:
        """Retention policies, by their name in `scheduling: {retention: …}`."""
        return _by_name(self._others(RETENTION), RETENTION.noun)

    @property
    def beside_layers(self) -> Mapping[str, OffersBeside]:
        """Policies that belong to no layer: offers by name, for each key under `scheduling:`."""
        return {
            ADMISSION.key: self.admission_policies,
            SCALER.key: self.scalers,
            RETENTION.key: self.retention_policies,
        }

    def admission_policy(self, name: str) -> Offer[AdmissionSpec]:
        """Return the admission policy of this name; raises `UnknownNameError`."""
        return lookup(self.admission_policies, ADMISSION.noun, name)

    def retention_policy(self, name: str) -> Offer[RetentionSpec]:
        """Return the retention policy of this name; raises `UnknownNameError`."""
        return lookup(self.retention_policies, RETENTION.noun, name)

    def scaler(self, name: str) -> Offer[ScalerSpec]:
        """Return the scaler of this name; raises `UnknownNameError`."""
        return lookup(self.scalers, SCALER.noun, name)

    @cached_property
    def _routing_parts(self) -> Mapping[RoutingPartKind, Mapping[str, Offer[RoutingPartSpec]]]:
        offers = self._others(ROUTING_PART)
        for offer in offers:
            _check_part_kind(offer)
        return {
            kind: _by_name((one for one in offers if one.spec.kind is kind), kind.value) for kind in RoutingPartKind
        }

    def routing_parts(self, kind: RoutingPartKind) -> Mapping[str, Offer[RoutingPartSpec]]:
        """Return the parts of composable routers of this kind by name, sorted."""
        return self._routing_parts[kind]

    def routing_part(self, kind: RoutingPartKind, name: str) -> Offer[RoutingPartSpec]:
        """Return the part of this kind and name; raises `UnknownNameError`."""
        return lookup(self.routing_parts(kind), kind.value, name)

    @property
    def others(self) -> Mapping[str, Mapping[str, AnyOffer]]:
        """Offers by kind (as named in listings) and name, without the policies of the layers."""
        parts = {f"routing {kind.value}": self.routing_parts(kind) for kind in RoutingPartKind}
        return {**self.beside_layers, **parts}

    def _others(self, kind: Kind[OtherT]) -> list[Offer[OtherT]]:
        claims = [*self.lazy(kind.hook), *(one for one in self.given_others if isinstance(one[1], kind.spec))]
        offers = [_checked(source, claim, kind.spec, kind.noun) for source, claim in claims]
        for offer in offers:
            _check_parameters(offer, kind.noun)
        return offers

    @cached_property
    def presets(self) -> Mapping[str, Offer[Preset]]:
        """Presets by name."""
        offers = [_checked(source, claim, Preset, "preset") for source, claim in self.preset_claims]
        return _by_name(offers, "preset")

    @cached_property
    def latency_models(self) -> Mapping[str, Offer[LatencyModelSpec]]:
        """Latency models, by their `type` in `latency: {type: …}`."""
        return self._offers("vajra_latency_models", LatencyModelSpec, "latency model")

    @cached_property
    def output_lengths(self) -> Mapping[str, Offer[OutputLengthSpec]]:
        """Output-length predictors, by their `type` in `output_length: {type: …}`."""
        return self._offers("vajra_output_length_predictors", OutputLengthSpec, "output-length predictor")

    @cached_property
    def observers(self) -> Mapping[str, Offer[ObserverSpec]]:
        """Observers, by their `type` in `observers: [{type: …}]`."""
        return self._offers("vajra_observers", ObserverSpec, "observer")

    def preset(self, name: str) -> Offer[Preset]:
        """Return the preset of this name; raises `UnknownNameError`."""
        return lookup(self.presets, "preset", name)

    def latency_model(self, name: str) -> Offer[LatencyModelSpec]:
        """Return the latency model of this name; raises `UnknownNameError`."""
        return lookup(self.latency_models, "latency model", name)

    def output_length(self, name: str) -> Offer[OutputLengthSpec]:
        """Return the output-length predictor of this name; raises `UnknownNameError`."""
        return lookup(self.output_lengths, "output-length predictor", name)

    def observer(self, name: str) -> Offer[ObserverSpec]:
        """Return the observer of this name; raises `UnknownNameError`."""
        return lookup(self.observers, "observer", name)

    def _offers(self, hook: str, kind: type[SpecT], noun: str) -> Mapping[str, Offer[SpecT]]:
        return _by_name([_checked(source, claim, kind, noun) for source, claim in self.lazy(hook)], noun)


class _Policies(Mapping[str, Offer[PolicySpec]]):
    """Policies of a layer by name, sorted; a `PolicyAt` is imported and checked when its name is looked up."""

    def __init__(self, layer: Layer, offers: Iterable[OfferOfPolicy]) -> None:
        self._kind = kind_of(layer)
        self._given: dict[str, OfferOfPolicy] = {}
        for offer in offers:
            _claim(self._given, offer.spec.name, offer, self._kind)
        self._loaded: dict[str, Offer[PolicySpec]] = {}

    def __getitem__(self, name: str) -> Offer[PolicySpec]:
        """Return the offer of this name."""
        if name not in self._loaded:
            self._loaded[name] = _loaded(self._given[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(sorted(self._given))

    def __len__(self) -> int:
        return len(self._given)

    def with_aliases(self) -> Mapping[str, OfferOfPolicy]:
        """Return the offers by name or alias."""
        named = dict(self._given)
        for offer in self._given.values():
            for alias in offer.spec.aliases:
                _claim(named, alias, offer, self._kind)
        return named


def _policy_offer(source: PluginSource, claim: object) -> OfferOfPolicy:
    """Return the claim as an offer. Raises `PluginError` unless it is a well-formed `PolicySpec` or `PolicyAt`."""
    if isinstance(claim, PolicyAt):
        _check_name(source, claim.name, "policy")
        offer = Offer(claim, source)
        _check_layer_and_aliases(offer)
        return offer
    return _checked_policy(source, claim)


def _loaded(offer: OfferOfPolicy) -> Offer[PolicySpec]:
    """Import the policy of an offer; raises `PluginError` if it is missing, or differs from what `PolicyAt` states."""
    given, source = offer.spec, offer.source
    if isinstance(given, PolicySpec):
        return Offer(given, source)
    try:
        spec = given.load()
    except Exception as error:
        reason = f"offers the policy {given.name!r}, but {given.place!r} raised {type(error).__name__} ({error})"
        raise PluginError(str(source), reason) from error
    found = _checked_policy(source, spec)
    stated, own = ((one.name, one.layer, one.aliases) for one in (given, found.spec))
    if stated != own:
        reason = f"offers {stated!r} as name, layer and aliases of a policy; {given.place!r} says {own!r}"
        raise PluginError(str(source), reason)
    return found


def _module_of(spec: object) -> str:
    """Return the name of the module that defines a policy, for use as the package name in its `PluginSource`."""
    return str(getattr(getattr(spec, "config", None), "__module__", None) or type(spec).__module__)


def kind_of(layer: Layer) -> str:
    """Return the term for a policy of this layer in messages."""
    return layer.value.replace("_", " ")


def lookup(offers: Mapping[str, Offer[SpecT]], kind: str, name: str) -> Offer[SpecT]:
    """Return the offer of this name; raises `UnknownNameError` with the nearest name and a list of all names."""
    if name not in offers:
        raise UnknownNameError(kind, name, offers)
    return offers[name]


def _checked(source: PluginSource, claim: object, kind: type[SpecT], noun: str) -> Offer[SpecT]:
    """Return the claim as an offer if it is a well-formed spec of its kind; raises `PluginError` otherwise."""
    if not isinstance(claim, kind):
        raise PluginError(str(source), f"offers {claim!r} as {_a(noun)}; expected {_a(kind.__name__)}")
    given: Any = claim  # annotations do not guarantee the type that a plug-in passes
    _check_name(source, given.name, noun)
    if not isinstance(given.summary, str) or not given.summary.strip():
        raise PluginError(str(source), f"offers the {noun} {claim.name!r} without a summary; one sentence is needed")
    if not isinstance(claim, Preset):
        _check_config(source, f"the {noun} {claim.name!r}", given.config, given.build)
    return Offer(claim, source)


def _check_name(source: PluginSource, name: object, noun: str) -> None:
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        allowed = "lower-case letters, digits, '_', '-' and '.'"
        raise PluginError(str(source), f"offers {_a(noun)} named {name!r}; a name is made of {allowed}")


def _a(noun: str) -> str:
    """Return a noun with its indefinite article."""
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def _check_config(source: PluginSource, what: str, config: object, build: object) -> None:
    if not (isinstance(config, type) and issubclass(config, BaseModel)):
        raise PluginError(str(source), f"offers {what} with config {config!r}; expected a pydantic model class")
    if config.model_config.get("extra") != "forbid":
        raise PluginError(
            str(source), f"offers {what} whose parameters ({config.__name__}) do not forbid unknown names"
        )
    if not callable(build):
        raise PluginError(str(source), f"offers {what} with build {build!r}; expected a callable")


def _check_part_kind(offer: Offer[RoutingPartSpec]) -> None:
    spec: Any = offer.spec
    what = f"the routing part {spec.name!r}"
    if not isinstance(spec.kind, RoutingPartKind):
        choices = ", ".join(f"RoutingPartKind.{kind.name}" for kind in RoutingPartKind)
        raise PluginError(str(offer.source), f"offers {what} of kind {spec.kind!r}; expected one of {choices}")


def _checked_policy(source: PluginSource, claim: object) -> Offer[PolicySpec]:
    offer = _checked(source, claim, PolicySpec, "policy")
    _check_layer_and_aliases(offer)
    _check_parameters(offer, "policy")
    return offer


def _check_layer_and_aliases(offer: OfferOfPolicy) -> None:
    spec: Any = offer.spec
    what = f"the policy {spec.name!r}"
    if not isinstance(spec.layer, Layer):
        choices = ", ".join(f"Layer.{layer.name}" for layer in Layer)
        raise PluginError(str(offer.source), f"offers {what} in layer {spec.layer!r}; expected one of {choices}")
    if not isinstance(spec.aliases, tuple) or not all(
        isinstance(alias, str) and NAME_PATTERN.fullmatch(alias) for alias in spec.aliases
    ):
        raise PluginError(str(offer.source), f"offers {what} with aliases {spec.aliases!r}; expected a tuple of names")


def _check_parameters(offer: AnyOffer, noun: str) -> None:
    config: type[BaseModel] = offer.spec.config  # a plug-in may ignore the annotation and pass another type
    if not issubclass(config, PolicyConfig):
        what = f"{noun} {offer.spec.name!r} with {config.__name__}"
        raise PluginError(str(offer.source), f"offers the {what}, which is not a PolicyConfig")


def _by_name(offers: Iterable[Offer[SpecT]], kind: str) -> Mapping[str, Offer[SpecT]]:
    """Return offers by name, sorted; a duplicate name is an error that names both plug-ins."""
    named: dict[str, Offer[SpecT]] = {}
    for offer in offers:
        _claim(named, offer.spec.name, offer, kind)
    return MappingProxyType(dict(sorted(named.items())))


def _claim(named: dict[str, OfferT], name: str, offer: OfferT, kind: str) -> None:
    other = named.setdefault(name, offer)
    if other is not offer:
        remedy = f"Uninstall one of them, or leave one out with {DISABLE_VARIABLE}"
        first, second = other.source, offer.source
        raise PluginError(str(second), f"offers {_a(kind)} named {name!r}, and so does plug-in {first}. {remedy}")
