"""Discover, register and build plug-ins: policies, latency models, observers."""

from __future__ import annotations

from vajra_py.plugins.build import (
    OutputLengthInputs,
    build_admission_policy,
    build_latency_model,
    build_observer,
    build_output_lengths,
    build_policy,
    build_retention,
    build_scaler,
    routing_part_builder,
    validated_params,
)
from vajra_py.plugins.discovery import build_registry, load_registry
from vajra_py.plugins.parameters import Parameter, parameters_of
from vajra_py.plugins.registry import (
    ADMISSION,
    RETENTION,
    SCALER,
    AnyOffer,
    Kind,
    Offer,
    OffersBeside,
    PluginSource,
    Registry,
    kind_of,
)
from vajra_py.plugins.shapes import (
    check_admission_shape,
    check_part_shape,
    check_policy_shape,
    check_retention_shape,
    check_scaler_shape,
)

__all__ = [
    "ADMISSION",
    "RETENTION",
    "SCALER",
    "AnyOffer",
    "Kind",
    "Offer",
    "OffersBeside",
    "OutputLengthInputs",
    "Parameter",
    "PluginSource",
    "Registry",
    "build_admission_policy",
    "build_latency_model",
    "build_observer",
    "build_output_lengths",
    "build_policy",
    "build_registry",
    "build_retention",
    "build_scaler",
    "check_admission_shape",
    "check_part_shape",
    "check_policy_shape",
    "check_retention_shape",
    "check_scaler_shape",
    "kind_of",
    "load_registry",
    "parameters_of",
    "routing_part_builder",
    "validated_params",
]
