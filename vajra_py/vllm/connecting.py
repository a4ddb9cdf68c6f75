"""Check that the KV connector of a configuration works with this scheduler, and create the connector.

A connector that uses the block pool of vLLM's own scheduler is refused before the model is loaded: this scheduler does
not pass one to connectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vajra_py.config import SystemConfig
from vajra_py.config.single import only_replicaset
from vajra_py.contract import Layer
from vajra_py.errors import ConfigError, Problem
from vajra_py.vllm.mechanism import ConnectorRules
from vajra_py.vllm.support import holds_states

if TYPE_CHECKING:
    from vajra_py.vllm.connector import Connector, OnLookup

NOT_LOADED = "its KV could not be loaded"
"""Reason reported to the client of a request whose KV could not be loaded."""
_OF_VLLMS_MEMORY = ("bind_gpu_block_pool", "bind_kv_cache_manager", "has_pending_block_frees")
"""Methods that a connector overrides only if it uses the block pool of vLLM's own scheduler."""


def check_connector(vllm_config: Any) -> None:
    """Raise `ConfigError` if the configured connector, or one of its parts, uses the block pool of vLLM's scheduler."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    where, problems = "--kv-transfer-config", []
    for connector in _classes(transfer):
        names = [name for name in _OF_VLLMS_MEMORY if _overrides(connector, name)]
        if names:
            message = f"names {connector.__name__}, which uses the block pool of vLLM's own scheduler ({names[0]})"
            problems.append(Problem(where, message, "Leave --scheduler-cls out to use it"))
    if problems:
        raise ConfigError(problems)


def _classes(transfer: Any) -> Iterator[type[Any]]:
    """Yield the classes of a configuration's connectors; for a multi-connector, those of its parts."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    found = KVConnectorFactory.get_connector_class(transfer)
    if not issubclass(found, MultiConnector):
        yield found
        return
    for part in transfer.kv_connector_extra_config.get("connectors") or ():
        yield from _classes(KVTransferConfig(**{"engine_id": transfer.engine_id, **part}))


def _overrides(connector: type[Any], name: str) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

    return getattr(connector, name, None) is not getattr(KVConnectorBase_V1, name, None)


def rules_of(vllm_config: Any, kv_cache_config: Any, config: SystemConfig) -> ConnectorRules | None:
    """Return the rules for using a vLLM's connector; None without a connector."""
    if vllm_config.kv_transfer_config is None:
        return None
    num_drafts = vllm_config.num_speculative_tokens
    prioritizer = only_replicaset(config).scheduling.choice(Layer.REQUEST_PRIORITIZER).policy
    return ConnectorRules(
        holding_order="begin" if prioritizer == "fcfs" else "urgency",
        on_failure=vllm_config.kv_transfer_config.kv_load_failure_policy,
        forms_ahead=bool(vllm_config.scheduler_config.async_scheduling),
        draft_tokens=num_drafts and 1 + num_drafts + vllm_config.num_lookahead_tokens,
        draft_tables=sum(not holds_states(one.kv_cache_spec) for one in kv_cache_config.kv_cache_groups),
    )


def connector_of(
    scheduler: Any, vllm_config: Any, on_lookup: OnLookup, num_in_flight: Callable[[str], int]
) -> Connector | None:
    """Create the connector of `--kv-transfer-config` and attach it to the scheduler's mechanism; None without one.

    `num_in_flight` returns the number of a request's tokens in steps in flight. Errors of the connector's constructor
    are passed on.
    """
    rules = rules_of(vllm_config, scheduler.kv_cache_config, scheduler.config)
    if rules is None:
        return None
    from vajra_py.vllm.connector import Connector

    made = Connector(
        vllm_config,
        scheduler.kv_cache_config,
        scheduler.mechanism,
        on_lookup,
        rules=rules,
        num_in_flight=num_in_flight,
        log_stats=scheduler.log_stats,
    )
    if scheduler.config.backend.settings.fallback is not None:
        made.relieve()
    return made
