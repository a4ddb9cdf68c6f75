"""Latency model and output-length predictor for the policies of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vajra_py.config import SystemConfig
from vajra_py.contract.latency import LatencyModel, OutputLengthPredictor
from vajra_py.engine.build import EngineServices
from vajra_py.engine.config import ModelBackendConfig
from vajra_py.latency.models.unknown import NoPredictions
from vajra_py.plugins import OutputLengthInputs, Registry, build_latency_model, build_output_lengths
from vajra_py.runtime.support.seeds import SeedTree


def predictions(settings: ModelBackendConfig, registry: Registry) -> LatencyModel:
    """Return the latency model for policies' predictions; if the settings name none, the returned model raises
    `ConfigError` when it is used.
    """
    if settings.latency is None:
        return NoPredictions(f"backend.{settings.kind}.latency")
    return build_latency_model(settings.latency.type, settings.latency.parameters, registry)


def length_predictor(
    settings: ModelBackendConfig, seeds: SeedTree, lengths: Mapping[str, int], registry: Registry
) -> OutputLengthPredictor:
    """Return the output-length predictor for policies; `lengths`: true output lengths by request, for oracles."""
    inputs = OutputLengthInputs(seeds.child("output_lengths").stream, lengths)
    return build_output_lengths(settings.output_length.type, settings.output_length.parameters, inputs, registry)


def engine_services(
    config: SystemConfig, registry: Registry, lengths: Mapping[str, int], **replaced: Any
) -> EngineServices:
    """Return the services of a run; `replaced`: fields of `EngineServices` to override."""
    settings: ModelBackendConfig = config.backend.settings
    seeds = SeedTree(config.seed).child("policies")
    return EngineServices(
        registry,
        predictions(settings, registry),
        length_predictor(settings, seeds, lengths, registry),
        seeds,
        **{
            "load": settings.load,
            "latencies": {name: predictions(settings.of(name), registry) for name in settings.own_settings},
            **replaced,
        },
    )
