"""Access to the replicaset of a system that has exactly one."""

from __future__ import annotations

from vajra_py.config.schema import ReplicasetConfig, SystemConfig
from vajra_py.errors import ConfigError, Problem


def only_replicaset(config: SystemConfig) -> ReplicasetConfig:
    """Return the only replicaset of a system. Raises `ConfigError` if there are several."""
    replicasets = config.effective_replicasets
    if len(replicasets) != 1:
        raise ConfigError(Problem("replicasets", f"there are several ({', '.join(replicasets)})", "Allowed: one"))
    (only,) = replicasets.values()
    return only
