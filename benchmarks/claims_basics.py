"""Claims of grade 1 of the policies that others are compared with; tests hold them."""

from __future__ import annotations

from claims_parts import Claim

POLICIES = "tests/policies"
ORDERS, ROUTERS = f"{POLICIES}/test_prioritizers.py", f"{POLICIES}/test_replicaset_schedulers.py"
ADMISSION, SCALERS = f"{POLICIES}/test_admission_policies.py", f"{POLICIES}/test_scalers.py"
KEPT, SCALING = f"{POLICIES}/test_retention_policies.py", "scaling.md"


def _exact(policy: str, text: str, test: str, paper: str = "exact", card: str = "") -> Claim:
    return Claim(policy, text, paper, 1, test=test, card=card)


CLAIMS = [
    _exact("fcfs", "order is by arrival, then by submission; `preempted` sets the place of preempted requests", ORDERS),
    _exact("priority", "the lowest number goes first, then order is by arrival", ORDERS),
    _exact("edf", "a deadline is the predicted time of the prompt's chunks times the multiplier", ORDERS),
    _exact(
        "lrs", "relative slack follows its formula at any time; two waiting requests swap places as time passes", ORDERS
    ),
    _exact("round_robin", "replicas take turns; those that are down are skipped", ROUTERS),
    _exact("random", "uniform over the replicas that are up", ROUTERS),
    _exact(
        "least_loaded", "the replica with the fewest requests, or tokens, is chosen; replicas stay balanced", ROUTERS
    ),
    _exact("power_of_two", "the less loaded of two distinct replicas; the longest of 64 queues is 2 to 3", ROUTERS),
    _exact("pull", "replicas with room pull requests in order of urgency", ROUTERS),
    _exact("prefix_affinity", "a prompt is routed to its cached prefix unless loads are too imbalanced", ROUTERS),
    _exact(
        "endpoint_picker",
        "scores of the replicas that pass the filters are clamped, weighted and summed; ties are broken uniformly",
        f"{POLICIES}/test_endpoint_picker.py",
    ),
    _exact("micro_requests", "a request that is split at any token loses no token", f"{POLICIES}/test_dynaserve.py"),
    _exact(
        "fixed_chunk",
        "steps have all decodes, then prompts by urgency, up to the chunk size",
        f"{POLICIES}/test_fill.py",
    ),
    _exact(
        "dynamic_chunk",
        "each chunk is the largest that keeps the step within its target time",
        f"{POLICIES}/test_target_time_chunks.py",
    ),
    _exact(
        "space_sharing",
        "a long prompt's slack is given to other prompts, at most half of a step; classes do not exceed their shares",
        f"{POLICIES}/test_space_sharing.py",
    ),
    _exact(
        "preemptive",
        "more urgent requests take slots and memory, no more than they need and only if they can then run",
        f"{POLICIES}/test_preemptive.py",
    ),
    _exact(
        "token_bucket",
        "in every window of t seconds a tenant gets at most capacity + rate t prompt tokens",
        ADMISSION,
        "bound of the bucket",
    ),
    _exact("max_load", "the bound holds at all times; the most urgent requests are admitted first", ADMISSION),
    _exact(
        "saturation_shedding", "saturation is that of a manual calculation; only sheddable requests are shed", ADMISSION
    ),
    _exact("probabilistic_shedding", "requests are shed with the probability of the formula", ADMISSION),
    _exact(
        "priority_holdback",
        "ceilings are those of a manual calculation; urgent requests stay fast, and no request is lost",
        ADMISSION,
    ),
    _exact("soft_reflective_ceiling", "ceilings open after the number of cycles given by the formula", ADMISSION),
    *(
        _exact(one, "eviction order is that of a manual calculation", KEPT)
        for one in ("lru", "mru", "lfu", "fifo", "filo", "slru", "ttl")
    ),
    _exact(
        "priority",
        "of cached content, content used only by less urgent requests is evicted first",
        KEPT,
        card="reference/policies.md#priority-of-cached-content",
    ),
    _exact("arc", "content used twice survives a scan; misses adapt the target size", KEPT),
    _exact(
        "session_pin",
        "a session's content is still cached within the time of its pin, and pins never block a replica",
        "tests/runtime/test_retention_runs.py",
    ),
    _exact("continuum_pins", "slow tools get no pin", f"{POLICIES}/test_program_order.py"),
    _exact(
        "target_utilization",
        "replica counts are those of Kubernetes' autoscaler, with its windows",
        SCALERS,
        card=f"{SCALING}#target_utilization",
    ),
    _exact(
        "dynamo_planner",
        "thresholds, budgets and SLOs are those of a manual calculation",
        SCALERS,
        card=f"{SCALING}#dynamo_planner",
    ),
]
