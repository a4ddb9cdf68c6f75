"""Build and check policies, routing parts, latency models, predictors and observers, by name and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from pydantic import BaseModel, ValidationError

from vajra_py.contract import (
    AdmissionPolicy,
    Layer,
    PolicyContext,
    RetentionPolicy,
    RoutingContext,
    RoutingPartChoice,
    Scaler,
    SchedulingPolicy,
)
from vajra_py.contract.context import BuildRoutingPart
from vajra_py.contract.hookspecs import LatencyModelSpec, ObserverSpec, OutputLengthSpec
from vajra_py.contract.latency import LatencyModel, OutputLengthPredictor
from vajra_py.contract.observer import Observer
from vajra_py.errors import (
    POLICY_EXCEPTIONS,
    ConfigError,
    PluginError,
    Problem,
    VajraError,
    check_is_own_fault,
)
from vajra_py.plugins.discovery import load_registry
from vajra_py.plugins.registry import ADMISSION, RETENTION, SCALER, Kind, Offer, OfferBeside, Registry
from vajra_py.plugins.shapes import (
    check_admission_shape,
    check_methods,
    check_part_shape,
    check_policy_shape,
    check_retention_shape,
    check_scaler_shape,
)


def build_policy(
    layer: Layer,
    name: str,
    params: Mapping[str, Any] | BaseModel,
    context: PolicyContext,
    registry: Registry | None = None,
) -> SchedulingPolicy:
    """Build the policy of this name (or alias) from its parameters and check it against the layer's Protocol.

    Parameters that are an instance of the policy's own model count as validated.

    Raises:
        UnknownNameError: there is no such policy in the layer.
        ConfigError: the parameters are wrong or do not fit the replica (the policy raised `ValueError`).
        PluginError: the package builds an object that is not a policy of the layer.
    """
    offer = (registry or load_registry()).policy(layer, name)
    where = f"scheduling.{layer.value}"
    config = _validated(offer.spec.config, params, f"{where}.params")
    policy: SchedulingPolicy = _built(offer, where, lambda: offer.spec.build(config, context))
    check_policy_shape(layer, policy, f"policy {offer.spec.name!r}", str(offer.source))
    return policy


def build_admission_policy(
    name: str,
    params: Mapping[str, Any] | BaseModel,
    context: PolicyContext,
    registry: Registry | None = None,
) -> AdmissionPolicy:
    """Build the admission policy of this name and check its methods; raises like `build_policy`."""
    offer = (registry or load_registry()).admission_policy(name)
    policy: AdmissionPolicy = _built_beside(ADMISSION, offer, params, context, check_admission_shape)
    return policy


def build_scaler(
    name: str, params: Mapping[str, Any] | BaseModel, context: PolicyContext, registry: Registry | None = None
) -> Scaler:
    """Build the scaler of this name and check its methods; raises like `build_policy`."""
    offer = (registry or load_registry()).scaler(name)
    scaler: Scaler = _built_beside(SCALER, offer, params, context, check_scaler_shape)
    return scaler


def build_retention(
    name: str, params: Mapping[str, Any] | BaseModel, context: PolicyContext, registry: Registry | None = None
) -> RetentionPolicy:
    """Build the retention policy of this name and check its methods; raises like `build_policy`."""
    offer = (registry or load_registry()).retention_policy(name)
    policy: RetentionPolicy = _built_beside(RETENTION, offer, params, context, check_retention_shape)
    return policy


def _built_beside(
    kind: Kind[Any],
    offer: OfferBeside,
    params: Mapping[str, Any] | BaseModel,
    context: PolicyContext,
    check_shape: Callable[[object, str, str], None],
) -> Any:
    where = f"scheduling.{kind.key}"
    config = _validated(offer.spec.config, params, f"{where}.params")
    policy = _built(offer, where, lambda: offer.spec.build(config, context))
    check_shape(policy, f"{kind.noun} {offer.spec.name!r}", str(offer.source))
    return policy


def routing_part_builder(registry: Registry | None = None) -> BuildRoutingPart:
    """Return the function for `PolicyContext.build_part`, which builds routing parts of the registry.

    `registry` defaults to the installed plug-ins.
    """

    def build(choice: RoutingPartChoice, context: RoutingContext) -> Any:
        """Build the chosen part; raises like `build_policy`."""
        offer = (registry or load_registry()).routing_part(choice.kind, choice.name)
        where = f"{choice.kind.value} {choice.name}"
        config = _validated(offer.spec.config, choice.params, f"{where}: params")
        part = _built(offer, where, lambda: offer.spec.build(config, context))
        check_part_shape(choice.kind, part, f"{choice.kind.value} {choice.name!r}", str(offer.source))
        return part

    return build


def build_latency_model(
    name: str, params: Mapping[str, Any] | BaseModel, registry: Registry | None = None
) -> LatencyModel:
    """Build the latency model of this name; raises like `build_policy`."""
    offer = (registry or load_registry()).latency_model(name)
    where = "latency"
    config = validated_params(offer, params, where)
    model: LatencyModel = _built(offer, where, lambda: offer.spec.build(config))
    check_methods(model, {"stage_time_s": 1, "batch_time_s": 1}, f"latency model {name!r}", str(offer.source))
    return model


class OutputLengthInputs(Struct, frozen=True):
    """Inputs for building an output-length predictor: random streams by name, and the true lengths (for oracles)."""

    random_stream: Callable[[str], Any]
    output_tokens: Mapping[str, int]


def build_output_lengths(
    name: str, params: Mapping[str, Any] | BaseModel, inputs: OutputLengthInputs, registry: Registry | None = None
) -> OutputLengthPredictor:
    """Build the output-length predictor of this name; raises like `build_policy`."""
    offer = (registry or load_registry()).output_length(name)
    where = "output_length"
    config = validated_params(offer, params, where)
    predictor: OutputLengthPredictor = _built(
        offer, where, lambda: offer.spec.build(config, inputs.random_stream, inputs.output_tokens)
    )
    check_methods(predictor, {"predict": 1}, f"output-length predictor {name!r}", str(offer.source))
    return predictor


def build_observer(name: str, params: Mapping[str, Any] | BaseModel, registry: Registry | None = None) -> Observer:
    """Build the observer of this name; raises like `build_policy`."""
    offer = (registry or load_registry()).observer(name)
    config = validated_params(offer, params, "observers")
    observer: Observer = _built(offer, "observers", lambda: offer.spec.build(config))
    if not isinstance(observer, Observer):
        raise PluginError(
            str(offer.source), f"observer {name!r}: built {observer!r}; expected a vajra_py.contract.observer.Observer"
        )
    return observer


def validated_params(
    offer: Offer[LatencyModelSpec] | Offer[OutputLengthSpec] | Offer[ObserverSpec],
    params: Mapping[str, Any] | BaseModel,
    where: str,
) -> BaseModel:
    """Return the parameters as an instance of the offer's own model, with `type` set if the model has that field.
    Raises `ConfigError`.
    """
    config = offer.spec.config
    if isinstance(params, BaseModel):
        return _validated(config, params, where)
    given = {key: value for key, value in params.items() if key != "type"}
    if "type" in config.model_fields:
        given["type"] = offer.spec.name
    return _validated(config, given, where)


def _validated(config: type[BaseModel], params: Mapping[str, Any] | BaseModel, where: str) -> BaseModel:
    if isinstance(params, BaseModel):
        if isinstance(params, config):
            return params
        params = params.model_dump(mode="json", by_alias=True)  # a model of another registry: validate its values again
    try:
        return config.model_validate(dict(params))
    except ValidationError as error:
        raise ConfigError(
            Problem(".".join([where, *map(str, each["loc"])]), f"{each['msg']} (got {each['input']!r})")
            for each in error.errors(include_url=False)
        ) from error


def _built(offer: Offer[Any], where: str, build: Callable[[], Any]) -> Any:
    """Return the object that the plug-in builds.

    A `ValueError` of the plug-in becomes `ConfigError` (wrong settings), any other exception `PluginError`.
    """
    try:
        return build()
    except VajraError:
        raise
    except ValueError as error:
        problem = Problem(where, f"{offer.spec.name!r} of {offer.package} {offer.version} cannot be built: {error}")
        raise ConfigError(problem) from error
    except POLICY_EXCEPTIONS as error:
        check_is_own_fault(error)
        reason = f"building {offer.spec.name!r} raised {type(error).__name__} ({error})"
        raise PluginError(str(offer.source), reason) from error
