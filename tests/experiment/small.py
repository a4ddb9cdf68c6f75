"""An experiment that takes a fraction of a second, for tests of what happens to runs."""

from __future__ import annotations

from typing import Any

WORKLOAD: dict[str, Any] = {
    "type": "synthetic",
    "arrivals": {"type": "poisson", "rate": 20.0},
    "num_requests": 12,
    "prompt_tokens": {"type": "uniform", "min": 20, "max": 300},
    "output_tokens": {"type": "uniform", "min": 2, "max": 20},
}
SMALL: dict[str, Any] = {
    "version": 1,
    "name": "small",
    "scheduling": {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 128}},
    },
    "workload": WORKLOAD,
    "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
    "replica": {"max_model_len": 4096, "memory": {"num_blocks": 400}},
}
