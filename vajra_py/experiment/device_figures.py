"""Devices of an experiment's replicas, and their prices and power."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vajra_py.config import ExperimentConfig
from vajra_py.config.costs import CostsConfig
from vajra_py.config.replica import PoolConfig
from vajra_py.config.schema import ReplicasetConfig
from vajra_py.contract.latency import LatencyModel
from vajra_py.errors import ConfigError, Problem, did_you_mean
from vajra_py.latency import description_of, device_names
from vajra_py.latency.hardware.catalog import device_name
from vajra_py.latency.hardware.device_costs import DeviceCosts, device_costs
from vajra_py.metrics.summary.costs import ReplicasetDevices
from vajra_py.metrics.summary.pools import Pool
from vajra_py.plugins import Registry, build_latency_model


def latency_models(
    config: ExperimentConfig, registry: Registry, shared: LatencyModel | None = None
) -> dict[str, LatencyModel]:
    """Return the latency model of each replicaset; empty for a real engine.

    Keys are the names of the replicasets and, for pools with a latency model of their own, `model_key`. A replicaset
    without a model of its own has `shared` or, if `shared` is None, a model built from the backend's settings.
    """
    if config.backend.kind != "simulator":
        return {}
    settings = config.backend.settings
    shared = shared or build_latency_model(settings.latency.type, settings.latency.parameters, registry)
    models = dict.fromkeys(config.effective_replicasets, shared)
    for name, own in settings.replicasets.items():
        if own.latency is not None:
            models[name] = build_latency_model(own.latency.type, own.latency.parameters, registry)
        for pool, of_pool in own.pools.items():
            if of_pool.latency is not None:
                model = build_latency_model(of_pool.latency.type, of_pool.latency.parameters, registry)
                models[model_key(name, pool)] = model
    return models


def model_key(replicaset: str, pool: str) -> str:
    """Return the key of a pool in a mapping of latency models by replicaset."""
    return f"{replicaset}/{pool}"


def devices_of(config: ExperimentConfig, models: Mapping[str, LatencyModel]) -> dict[str, ReplicasetDevices]:
    """Return the devices of each replicaset whose device is named by its latency model or by `costs.device`.

    A replicaset with pools has an entry per pool, under `model_key`. `models` is the result of `latency_models`. Raises
    `ConfigError` if `costs.devices` has an entry for a device that is neither known nor used by the experiment.
    """
    found: dict[str, ReplicasetDevices] = {}
    for name, replicaset in config.effective_replicasets.items():
        for key, pool, ids in _parts(name, replicaset):
            device, count, stages = _named(models.get(key, models.get(name)))
            if device is None:
                device, count = config.costs.device, config.costs.devices_per_replica or count
            if device is not None:
                stages = pool.replica.pipeline_stages or stages
                costs, own = _figures(device, config.costs), None if ids is None else name
                found[key] = ReplicasetDevices(
                    costs, count, pool.most_replicas, stages, replicaset=own, replica_ids=ids
                )
    _check_names(config.costs, {one.costs.device for one in found.values()})
    return found


def _parts(name: str, replicaset: ReplicasetConfig) -> Iterator[tuple[str, PoolConfig, range | None]]:
    """Yield (key, settings, replica ids) for each pool of a replicaset. Without pools, yield one entry for the whole
    replicaset, with None as replica ids.
    """
    if not replicaset.pools:
        (only,) = replicaset.effective_pools.values()
        yield name, only, None
    else:
        for pool in pools_of(name, replicaset):
            yield pool.key, replicaset.pools[pool.name], pool.replica_ids


def pools_of(name: str, replicaset: ReplicasetConfig) -> list[Pool]:
    """Return the pools in a replicaset's settings, with the ids of their replicas; empty if `pools` is not set."""
    found: list[Pool] = []
    for pool, settings in replicaset.pools.items():
        first = found[-1].replica_ids.stop if found else 0
        ids = range(first, first + settings.most_replicas)
        found.append(Pool(name, pool, replicaset.role_of(pool).value, ids))
    return found


def _named(model: LatencyModel | None) -> tuple[str | None, int, int]:
    """Return (name of the device, number of devices, number of pipeline stages) of a replica."""
    if model is None:
        return None, 1, 1
    described = description_of(model)
    return described.device, described.num_devices, model.num_stages


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
