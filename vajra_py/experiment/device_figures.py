"""Which devices an experiment's replicas are made of, and what those cost."""

from __future__ import annotations

from vajra_py.config import ExperimentConfig, TypedChoice
from vajra_py.config.costs import CostsConfig
from vajra_py.errors import ConfigError, Problem, did_you_mean
from vajra_py.latency import device_names
from vajra_py.latency.hardware.catalog import device_name
from vajra_py.latency.hardware.device_costs import DeviceCosts, NamesDevices, device_costs
from vajra_py.metrics.summary.costs import ReplicasetDevices


def devices_of(config: ExperimentConfig) -> dict[str, ReplicasetDevices]:
    """The devices of each replicaset whose device is named, by its latency model or by `costs.device`.

    Raises `ConfigError` where `costs.devices` has figures of a device that is neither described nor used here.
    """
    found: dict[str, ReplicasetDevices] = {}
    for name, replicaset in config.effective_replicasets.items():
        latency = _latency(config, name)
        device, count, stages = _named(latency)
        device = device or config.costs.device
        if config.costs.devices_per_replica is not None and not isinstance(_parameters(latency), NamesDevices):
            count = config.costs.devices_per_replica
        if device is not None:
            stages = replicaset.replica.pipeline_stages or stages
            found[name] = ReplicasetDevices(_figures(device, config.costs), count, replicaset.num_replicas, stages)
    _check_names(config.costs, {one.costs.device for one in found.values()})
    return found


def _latency(config: ExperimentConfig, replicaset: str) -> TypedChoice | None:
    """The latency model of a replicaset's steps; None of a real engine."""
    if config.backend.kind != "simulator":
        return None
    settings = config.backend.settings
    own = settings.replicasets.get(replicaset)
    choice: TypedChoice = settings.latency if own is None or own.latency is None else own.latency
    return choice


def _parameters(latency: TypedChoice | None) -> object:
    return None if latency is None else latency.parameters


def _named(latency: TypedChoice | None) -> tuple[str | None, int, int]:
    """Device, devices and pipeline stages of a replica."""
    parameters = _parameters(latency)
    if not isinstance(parameters, NamesDevices):
        return None, 1, 1
    device, count = parameters.replica_devices()
    return device, count, getattr(parameters, "pipeline_parallel", 1)


def _figures(device: str, costs: CostsConfig) -> DeviceCosts:
    known = device_costs(device)
    for name, one in costs.devices.items():
        if _canonical(name) == known.device:
            known = known.changed(one.given, one.source)
    return known


def _canonical(name: str) -> str:
    try:
        return device_name(name)
    except ConfigError:
        return name


def _check_names(costs: CostsConfig, used: set[str]) -> None:
    known = {*device_names(), *used}
    problems = [
        Problem(f"costs.devices.{name}", "is not a device that is described or used here", did_you_mean(name, known))
        for name in costs.devices
        if _canonical(name) not in known
    ]
    if problems:
        raise ConfigError(problems)
