"""Registration of the built-in latency models and output-length predictors."""

from __future__ import annotations

from vajra_py.contract.hookspecs import LatencyModelSpec, OutputLengthSpec
from vajra_py.latency.config import (
    AffineConfig,
    ConstantConfig,
    ConstantLengthsConfig,
    HistoryLengthsConfig,
    NoisyOracleLengthsConfig,
    NoLengthsConfig,
    OracleLengthsConfig,
    ProfiledConfig,
    QuantileLengthsConfig,
    RecordedConfig,
    RooflineConfig,
)
from vajra_py.latency.operators.bundle_config import ProfileBundleConfig
from vajra_py.latency.operators.operator_config import AiconfiguratorConfig
from vajra_py.latency.services.output_length import NoisyOracleLengths, OracleLengths, seed_from

BUILTIN_LATENCY_MODELS: list[LatencyModelSpec] = [
    LatencyModelSpec(
        "roofline", RooflineConfig, lambda config: config.build(), "from a model's config.json and a device's figures"
    ),
    LatencyModelSpec(
        "profiled",
        ProfiledConfig,
        lambda config: config.build(),
        "a fit to steps measured on a model and device, by `vajra profile` or of your own",
    ),
    LatencyModelSpec(
        "profile_bundle",
        ProfileBundleConfig,
        lambda config: config.build(),
        "operator times measured inside an engine on the same GPU and model",
    ),
    LatencyModelSpec(
        "aiconfigurator",
        AiconfiguratorConfig,
        lambda config: config.build(),
        "operator times by size, measured inside vLLM, SGLang or TensorRT-LLM, from the tables of aiconfigurator-core",
    ),
    LatencyModelSpec(
        "recorded", RecordedConfig, lambda config: config.build(), "replays the step durations of an earlier run"
    ),
    LatencyModelSpec("constant", ConstantConfig, lambda config: config.build(), "every step takes the same time"),
    LatencyModelSpec(
        "affine",
        AffineConfig,
        lambda config: config.build(),
        "a base and so much per token, request and attended token",
    ),
]

BUILTIN_OUTPUT_LENGTHS: list[OutputLengthSpec] = [
    OutputLengthSpec("none", NoLengthsConfig, lambda config, streams, truth: config.build(), "knows nothing"),
    OutputLengthSpec(
        "constant",
        ConstantLengthsConfig,
        lambda config, streams, truth: config.build(),
        "the same estimate for every request",
    ),
    OutputLengthSpec(
        "histogram",
        QuantileLengthsConfig,
        lambda config, streams, truth: config.build(),
        "given quantiles, narrowed by progress",
    ),
    OutputLengthSpec(
        "history",
        HistoryLengthsConfig,
        lambda config, streams, truth: config.build(),
        "like the last requests that ended, of the same tenant or of all",
    ),
    OutputLengthSpec("oracle", OracleLengthsConfig, lambda config, streams, truth: OracleLengths(truth), "the truth"),
    OutputLengthSpec(
        "noisy_oracle",
        NoisyOracleLengthsConfig,
        lambda config, streams, truth: NoisyOracleLengths(truth, config.sigma, seed_from(streams)),
        "the truth times a log-normal error that each request keeps",
    ),
]
