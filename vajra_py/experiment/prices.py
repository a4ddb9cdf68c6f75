"""Prices of replicas."""

from __future__ import annotations

from vajra_py.config import ExperimentConfig
from vajra_py.config.capacity import CapacityConfig


def replica_prices(config: ExperimentConfig, asked: CapacityConfig) -> tuple[tuple[float, ...], str]:
    """What a replica of each kind that is searched costs, and the unit of it; nothing where a rate is searched."""
    if asked.replicas is None:
        return (), "requests/s"
    return tuple(one.cost or 1.0 for one in asked.replicas.values()), "replicas"
