"""Live state for the dashboard: health, queues, batches, KV use, policies, latencies, events."""

from __future__ import annotations

from typing import Any

from vajra_py.contract import Layer
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.serve.observe.stats import ServerStats, SetStats
from vajra_py.serve.session.catalogue import Catalogue
from vajra_py.serve.session.session import EngineSession, SessionState


def live(controller: Controller, stats: ServerStats, catalogue: Catalogue) -> dict[str, Any]:
    """Return the dashboard's live data, as values that JSON can represent."""
    stats.count_output_tokens()
    return {
        "replicasets": [
            {"model": catalogue.label(name), **_replicaset(one, stats.sets[name])}
            for name, one in controller.replicasets.items()
        ],
        "classes": stats.percentiles(),
        "tenants": dict(stats.service_tokens),
        "events": list(stats.events),
    }


def server_health(session: EngineSession) -> dict[str, Any]:
    """Return the health line of the dashboard: `status`, `level` and `detail`.

    `level` is "bad" if the session has ended, or if it is ready but serves nothing. It is "good" if the session is
    ready and every replicaset and replica serves. Otherwise, for example while the engine is being loaded, it is
    "degraded".
    """
    state, unavailable = session.state, session.unavailable()
    replicas = 0 if session.engine is None else len(session.engine.replicas)
    down = replicas - session.num_replicas_up
    if state is SessionState.READY and not session.is_ready:
        return {"status": "not serving", "level": "bad", "detail": session.why_unavailable()}
    if state is SessionState.READY:
        parts = [f"{name}: {why}" for name, why in unavailable.items()]
        if down:
            parts.append(f"{down} of {replicas} replicas down, {session.num_restarting} being started again")
        return {"status": "ready", "level": "degraded" if parts else "good", "detail": "; ".join(parts)}
    level = "bad" if state in (SessionState.FAILED, SessionState.CLOSED) else "degraded"
    return {"status": state.value, "level": level, "detail": session.why_unavailable()}


def totals(controller: Controller, stats: ServerStats) -> dict[str, float]:
    """Return values of the whole server: current gauges, and counters since its start."""
    sets, replicas = stats.sets.values(), list(controller.replicas())
    num_blocks = sum(one.memory.num_blocks for one in replicas)
    queued = sum(len(one.queue) for one in replicas) + sum(len(one.shared) for one in controller.replicasets.values())
    return {
        "running": sum(one.running_set.num_running for one in replicas),
        "waiting": queued,
        "kv_used": 1.0 - sum(one.memory.free_blocks for one in replicas) / num_blocks,
        "steps": sum(sum(one.step.counts) for one in sets),
        "decode_tokens": sum(one.num_decodes for one in sets),
        "prefill_tokens": sum(one.prefill_tokens for one in sets),
        "finished": sum(one.ended["stop"] + one.ended["length"] for one in sets),
        "looked_up_tokens": sum(one.num_looked_up_tokens for one in sets),
        "cached_tokens": sum(one.num_cached_tokens for one in sets),
        "preemptions": sum(one.num_preemptions for one in sets),
        "failures": sum(sum(dict(one.lost).values()) for one in sets),
        "restarts": sum(sum(dict(one.restored).values()) for one in sets),
        **stats.recent_latencies(),
    }


def _replicaset(one: Replicaset, stats: SetStats) -> dict[str, Any]:
    return {
        "name": one.name,
        "policies": {} if one.policies is None else {layer.value: one.policies.name(layer) for layer in Layer},
        "replicas": [_replica(one, replica, stats) for replica in one.replicas],
        "shared_queue": len(one.shared),
        "prompt_tokens": stats.num_prompt_tokens,
        "output_tokens": stats.num_output_tokens,
        "ended": dict(stats.ended),
        "preemptions": stats.num_preemptions,
        "violations": sum(dict(stats.violations).values()),
        "steps": sum(stats.step.counts),
        "num_decodes": stats.num_decodes,
        "prefill_tokens": stats.prefill_tokens,
    }


def _replica(replicaset: Replicaset, replica: Replica, stats: SetStats) -> dict[str, Any]:
    running = replica.running_set.num_running
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
