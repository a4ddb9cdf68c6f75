"""Measure the cost of one placement by a composed router, in microseconds of CPU time.

The replicas are those of a run, with requests waiting and running on all of them; placements are not reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import PromptContent

REPLICAS = 1000
REQUESTS = 2000
ROUNDS = 15
PLACEMENTS = 100
FOUR = ("queue-scorer", "running-requests-size-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer")
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "least_loaded": ("least_loaded", {}),
    "default": ("endpoint_picker", {}),
    "four_scorers": ("endpoint_picker", {"scorers": list(FOUR)}),
    "in_flight": ("endpoint_picker", {"scorers": ["active-request-scorer", "token-load-scorer", *FOUR[-1:]]}),
}


def placements(policy: tuple[str, dict[str, Any]]) -> Callable[[], Any]:
    """Return one placement by a policy among replicas with work, of a request whose prefix some of them have."""
    options = HarnessOptions(num_replicas=REPLICAS, num_blocks=64, prefix_cache=PrefixCacheOptions())
    harness = Harness("fcfs", policy, "fixed_chunk", options)
    for number in range(REQUESTS):
        content = PromptContent(((f"prefix{number % 7}", 128), (f"own{number}", 40)))
        harness.submit(f"r{number}", content.num_tokens, 4, content=content)
    for replica_id in range(0, REPLICAS, 3):
        harness.step(replica_id)
    views = harness.replicaset._live
    request = harness.controller.find(f"r{REQUESTS - 1}")
    assert request is not None
    return lambda: harness.replicaset_scheduler.assign(request, views, 1.0)


def measure() -> dict[str, float]:
    """Every figure, by name."""
    figures: dict[str, float] = {}
    for name, policy in ROUTERS.items():
        place = placements(policy)
        rounds = []
        for _ in range(ROUNDS):
            started = time.process_time_ns()
            for _ in range(PLACEMENTS):
                place()
            rounds.append((time.process_time_ns() - started) / PLACEMENTS / 1000)
        figures[f"placement_us_{name}_{REPLICAS}_replicas"] = median(rounds)
    return figures
