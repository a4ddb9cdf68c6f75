"""Worker pools for experiments on a cluster: simulations run on its nodes; for an engine, the controller stays in this
process and the replicas run on the nodes.
"""

from __future__ import annotations

from vajra_py.cluster.connect import RayCluster
from vajra_py.config import ExperimentConfig
from vajra_py.experiment.runs.pool import InProcess, MakePool
from vajra_py.plugins import load_registry


def pool_on(cluster: RayCluster, config: ExperimentConfig, num_workers: int | None = None) -> MakePool:
    """Return a factory of worker pools that execute this experiment's runs on the cluster, with at most `num_workers`
    concurrent simulations.
    """
    if config.backend.kind == "simulator":
        from vajra_py.cluster.pool import RayPool

        return lambda progress: RayPool(cluster, num_workers, progress)
    from vajra_py.cluster.replicas import engine_on

    return lambda progress: InProcess(load_registry(), progress, engine_on(cluster))
