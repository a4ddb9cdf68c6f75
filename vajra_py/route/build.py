"""Build the controller of a router: replicas are servers; everything else is built as for a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from vajra_py.config import SystemConfig, naming_lines
from vajra_py.config.replica import ReplicaConfig
from vajra_py.contract import ReplicaLimits
from vajra_py.contract.latency import LatencyModel
from vajra_py.engine.services import length_predictor, predictions
from vajra_py.errors import ConfigError, Problem
from vajra_py.plugins import Registry
from vajra_py.route.config import RouteConfig, ServerConfig
from vajra_py.route.mechanism import RemoteLoad, RemoteReplica
from vajra_py.route.memory import ServerMemory
from vajra_py.runtime.kv import KvMemory, Retention
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.build import ModelFacts, Services, build_controller, build_memory
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.pools import check_reach
from vajra_py.runtime.step.plan import StepResult
from vajra_py.runtime.support.seeds import SeedTree


class _Servers:
    """Executor of requests that servers compute: no output is known in advance."""

    def known_output_tokens(self, request: Request) -> int | None:
        """See `Executor`."""
        return None

    def num_drafts(self, requests: Sequence[Request], at_most: int) -> Sequence[int]:
        """See `Executor`; servers draft for themselves."""
        return [0] * len(requests)

    def withheld_token(self, request: Request) -> StepResult:
        """See `Executor`; the router never withholds a token."""
        raise AssertionError("a router does not receive the tokens of prompts")

    def release(self, request: Request) -> None:
        """See `Executor`."""


def route_settings(config: SystemConfig) -> RouteConfig:
    """Return the settings of a router.

    Raises `ConfigError` if the backend is not `route`, or if its settings conflict with the system.
    """
    settings = config.backend.settings
    if not isinstance(settings, RouteConfig):
        message = f"there is nothing to route to (got {config.backend.kind})"
        raise ConfigError(Problem("backend", message, "Allowed: route"))
    problems = settings.problems(config.effective_replicasets)
    if problems:
        raise ConfigError(problems)
    return settings


def _server_memory(settings: ReplicaConfig, limits: ReplicaLimits, retention: Retention | None) -> KvMemory:
    return build_memory(settings, limits, retention=retention, kind=ServerMemory)


def build_router(config: SystemConfig, registry: Registry) -> Controller:
    """Build the controller of a router.

    Raises `ConfigError`, with file and line if known. Errors of a policy's construction are passed on.
    """
    with naming_lines(config):
        return _build_router(config, registry)


def _build_router(config: SystemConfig, registry: Registry) -> Controller:
    settings = cast(Any, route_settings(config))
    latency: LatencyModel = predictions(settings, registry)
    seeds = SeedTree(config.seed).child("policies")
    executor = _Servers()
    services = Services(
        registry=registry,
        latency=latency,
        output_lengths=length_predictor(settings, seeds, {}, registry),
        seeds=seeds,
        facts=ModelFacts(),
        executor_of=lambda replicaset, replica_id: executor,
        make_memory=_server_memory if settings.follows_kv_events else None,
        make_replica=RemoteReplica,
        make_load=RemoteLoad,
    )
    controller = build_controller(config, services)
    for replicaset in controller.replicasets.values():
        for replica in replicaset.replicas:
            if replica.memory.num_groups > 1 or replica.limits.pipeline_stages > 1:
                message = "is configured at the servers (got more than 1)"
                raise ConfigError(Problem("replica.pipeline_stages", message, "Allowed: 1"))
    check_reach(config, controller)
    return controller


def servers_of(config: SystemConfig) -> Mapping[tuple[str, int], ServerConfig]:
    """Return the settings of each server, by name of the replicaset and replica id."""
    settings, replicasets = route_settings(config), config.effective_replicasets
    found = {}
    for name, one in replicasets.items():
        servers = [each for pool in one.effective_pools for each in settings.of_pool(name, pool, replicasets)]
        found.update({(name, replica_id): each for replica_id, each in enumerate(servers)})
    return found


def description(controller: Controller) -> dict[str, Any]:
    """Return the limits that a recording states for each replicaset: the largest `max_model_len` and the largest number
    of blocks among its servers.
    """
    found: dict[str, Any] = {}
    for name, replicaset in controller.replicasets.items():
        limits = [one.limits for one in replicaset.replicas]
        found[name] = {
            "max_model_len": max(one.max_model_len for one in limits),
            "num_blocks": max(one.num_blocks for one in limits),
            "kv_bytes_per_token": 0,
        }
    return found
