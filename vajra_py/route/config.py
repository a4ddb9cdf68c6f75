"""Settings under `backend: {route: …}`: the servers, and how their load and cached content are estimated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from vajra_py.config import DEFAULT_POOL, ReplicasetConfig, TypedChoice, register_backend
from vajra_py.config.sections import PositiveCount, PositiveSeconds, Section, Text
from vajra_py.contract import PoolRole
from vajra_py.errors import Problem

DEFAULT_REPLICASET = "default"
_ADDRESS = re.compile(r"tcp://[^/\s]+:\d{1,5}|ipc://\S+")


class KvEventsConfig(Section):
    """Addresses at which a server publishes KV events (`--kv-events-config` of vLLM and SGLang)."""

    endpoint: Text = Field(description="ZeroMQ address of the publisher, such as tcp://10.0.0.5:5557.")
    replay_endpoint: Text | None = Field(
        None,
        description="ZeroMQ address at which missed events are replayed; null: after a gap, the content is learned again.",
    )
    topic: str = Field("", max_length=255, description="Topic of the events.")

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        if address is not None and (not _ADDRESS.fullmatch(address) or "*" in address):
            raise ValueError(
                f"is not an address to connect to (got {address!r}). Allowed: such as tcp://10.0.0.5:5557, ipc://PATH"
            )
        return address


class ServerConfig(Section):
    """One server: a replica of its pool. Replica ids follow the order of the file."""

    url: Text = Field(description="Address of its OpenAI-compatible API, without a path, such as http://10.0.0.5:8000.")
    pool: Text | None = Field(None, description="Pool that it belongs to; null: the only one.")
    replicaset: Text | None = Field(None, description="Replicaset that it belongs to; null: the only one.")
    kv_events: KvEventsConfig | None = Field(
        None,
        description="KV events, by which prefix hits are known exactly; null: they are estimated from the prompts sent there.",
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            is_server = is_server and not (parts.query or parts.fragment)
        except ValueError:  # the port is not a number up to 65535, or a bracket is missing
            is_server = False
        if not is_server:
            raise ValueError(f"is not the address of a server (got {url!r}). Allowed: such as http://10.0.0.5:8000")
        return url.rstrip("/")


class RouteConfig(Section):
    """Send requests to other servers, which compute them."""

    kind: ClassVar[str] = "route"

    servers: list[ServerConfig] = Field(min_length=1, description="Servers, as many as the pools have replicas.")
    models: list[Text] = Field(
        default_factory=list, description="Model names that requests may use; empty: any, and the servers decide."
    )
    adapters: list[Text] = Field(
        default_factory=list, description="Model names that are LoRA adapters, whose KV is not shared with others."
    )
    tokenizer: Text | None = Field(
        None,
        description=(
            "tokenizer.json to count prompt tokens with, or the model's folder, whose chat template is applied too; null: four bytes count as a token."
        ),
    )
    api_key_variable: Text | None = Field(
        None, description="Environment variable with the servers' API key; null: the client's is passed on."
    )
    metrics_interval_s: PositiveSeconds | None = Field(
        0.5, description="Interval at which a server's /metrics are read, seconds; null: never."
    )
    health_interval_s: PositiveSeconds = Field(
        1.0, description="Interval at which /health of a server that is down is checked, seconds."
    )
    connect_timeout_s: PositiveSeconds = Field(2.0, description="Maximum time to connect to a server, seconds.")
    first_token_timeout_s: PositiveSeconds = Field(
        300.0,
        description="Maximum time to the start of an answer, seconds; then the request is sent to another server.",
    )
    idle_timeout_s: PositiveSeconds = Field(
        120.0, description="Maximum pause within an answer, seconds; then it ends with an error."
    )
    max_tries: PositiveCount = Field(
        3, description="Maximum number of times that a request is sent before its first token."
    )
    wait_s: PositiveSeconds = Field(
        30.0, description="Time that requests wait while no server is up before they fail, seconds."
    )
    max_answer_bytes: Annotated[int, Field(strict=True, ge=1024)] = Field(
        64 * 2**20, description="Maximum size of an answer that is not streamed, bytes."
    )
    latency: TypedChoice | None = Field(
        None, description="Latency model for policies' predictions; null: policies that need one cannot be used."
    )
    output_length: TypedChoice = Field(
        default_factory=lambda: TypedChoice(type="none"), description="Predictor of output lengths for policies."
    )

    def problems(self, replicasets: Mapping[str, ReplicasetConfig]) -> list[Problem]:
        """Return a problem for each setting that conflicts with the replicasets of the system."""
        problems = self._unknown(replicasets)
        for name, one in {} if problems else replicasets.items():
            if one.scheduling.scaling is not None:
                message = f"a router does not start or stop servers (got {one.scheduling.scaling.policy!r})"
                problems.append(Problem(f"{name}.scheduling.scaling", message, "Allowed: null"))
            if one.hand_off.first_token == "source" and any(
                one.role_of(pool) is PoolRole.PREFILL for pool in one.effective_pools
            ):
                message = "a server that decodes samples the first token itself (got source)"
                problems.append(Problem(f"{name}.hand_off.first_token", message, "Allowed: recompute, as in vllm-pd"))
            replicas = [pool.replica for pool in one.effective_pools.values()]
            if any(replica.kv_parallel.groups > 1 or replica.memory.host_blocks for replica in replicas):
                message = "are configured at the servers (got kv_parallel or host_blocks)"
                problems.append(Problem(f"{name}.replica", message, "Allowed: neither"))
            if any(replica.adapters is not None for replica in replicas):
                message = "are configured at the servers; a router does not see them"
                problems.append(Problem(f"{name}.replica.adapters", message, "Allowed: null"))
            problems += self._kv_event_problems(name, one)
            for pool, settings in one.effective_pools.items():
                found = len(self.of_pool(name, pool, replicasets))
                if found != settings.num_replicas:
                    where = f"{name}.pools.{pool}.num_replicas" if one.pools else f"{name}.num_replicas"
                    message = f"is not the number of its servers (got {settings.num_replicas}, and {found} servers)"
                    problems.append(Problem(where, message, f"Allowed: {found}"))
        return problems

    def _kv_event_problems(self, name: str, replicaset: ReplicasetConfig) -> list[Problem]:
        if not self.follows_kv_events:
            return []
        problems = []
        if self.tokenizer is None:
            message = "is needed for KV events, which identify blocks by their tokens (got null)"
            problems.append(Problem("backend.route.tokenizer", message, "Allowed: the servers' tokenizer"))
        for pool, settings in replicaset.effective_pools.items():
            memory = settings.replica.memory
            where = f"{name}.pools.{pool}.replica.memory" if replicaset.pools else f"{name}.replica.memory"
            if memory.tiers is not None or not memory.prefix_cache.enabled:
                message = "cannot be combined with KV events (got tiers, or no prefix cache)"
                problems.append(Problem(where, message, "Allowed: tiers: null, prefix_cache: {enabled: true}"))
            if memory.tenant_salt:
                message = "is unknown to the servers, so their KV events would not match any prompt (got true)"
                problems.append(Problem(f"{where}.tenant_salt", message, "Allowed: false"))
        return problems

    @property
    def follows_kv_events(self) -> bool:
        """True if any server publishes KV events."""
        return any(one.kv_events is not None for one in self.servers)

    def _unknown(self, replicasets: Mapping[str, ReplicasetConfig]) -> list[Problem]:
        problems = []
        for index, server in enumerate(self.servers):
            where = f"backend.route.servers.{index}"
            name = server.replicaset or (next(iter(replicasets)) if len(replicasets) == 1 else "")
            if name not in replicasets:
                allowed = f"Allowed: {', '.join(replicasets)}"
                problems.append(Problem(f"{where}.replicaset", f"no such replicaset (got {name!r})", allowed))
                continue
            pools = replicasets[name].effective_pools
            pool = server.pool or (next(iter(pools)) if len(pools) == 1 else "")
            if pool not in pools:
                allowed = f"Allowed: {', '.join(pools)}"
                problems.append(Problem(f"{where}.pool", f"no such pool (got {pool!r})", allowed))
        return problems

    def of_pool(self, replicaset: str, pool: str, replicasets: Mapping[str, ReplicasetConfig]) -> list[ServerConfig]:
        """Return the servers of a pool, in the order of their replica ids."""
        only_set = next(iter(replicasets))
        pools = replicasets[replicaset].effective_pools
        only_pool = next(iter(pools), DEFAULT_POOL)
        return [
            one
            for one in self.servers
            if (one.replicaset or only_set) == replicaset and (one.pool or only_pool) == pool
        ]


register_backend("route", RouteConfig)
