"""Live state for the dashboard: queues, batches, KV use, policies, latencies."""

from __future__ import annotations

from typing import Any

from vajra_py.runtime.controller import Controller
from vajra_py.runtime.replica import Replica
from vajra_py.runtime.replicaset import Replicaset
from vajra_py.serve.catalogue import Catalogue
from vajra_py.serve.stats import ServerStats, SetStats


def live(controller: Controller, stats: ServerStats, catalogue: Catalogue) -> dict[str, Any]:
    """Everything that the page shows, as JSON has it."""
    return {
        "replicasets": [
            {"model": catalogue.label(name), **_replicaset(one, stats.sets[name])}
            for name, one in controller.replicasets.items()
        ],
        "classes": stats.percentiles(),
        "tenants": dict(stats.service_tokens),
        "jain_index": stats.jain_index(),
    }


def _replicaset(one: Replicaset, stats: SetStats) -> dict[str, Any]:
    choices = {} if one.policies is None else dict(one.policies.choices)
    return {
        "name": one.name,
        "policies": {layer.value: choice.policy for layer, choice in choices.items()},
        "replicas": [_replica(one, replica, stats) for replica in one.replicas],
        "shared_queue": len(one.shared),
        "prompt_tokens": stats.prompt.total,
        "output_tokens": stats.output.total,
        "ended": dict(stats.ended),
        "preemptions": stats.num_preemptions,
        "violations": sum(dict(stats.violations).values()),
        "steps": sum(stats.step.counts),
        "num_decodes": stats.num_decodes,
        "prefill_tokens": stats.prefill_tokens,
    }


def _replica(replicaset: Replicaset, replica: Replica, stats: SetStats) -> dict[str, Any]:
    running = replica.residents.num_running
    num_decodes, num_prefills, prefill_tokens = (
        stats.last_steps.get(replica.replica_id, (0, 0, 0)) if running else (0, 0, 0)
    )
    return {
        "replica": replica.replica_id,
        "up": replicaset.is_up(replica.replica_id),
        "running": running,
        "waiting": len(replica.queue),
        "max_batch_size": replica.limits.max_batch_size,
        "num_blocks": replica.memory.num_blocks,
        "kv_used": 1.0 - replica.memory.free_blocks / replica.memory.num_blocks,
        "batch": {"decodes": num_decodes, "prefills": num_prefills, "prefill_tokens": prefill_tokens},
    }
