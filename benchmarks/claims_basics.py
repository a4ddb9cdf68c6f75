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
    _exact("fcfs", "by arrival, then by submission; preempted requests go where `preempted` says", ORDERS),
    _exact("priority", "the lowest number first, then by arrival", ORDERS),
    _exact("edf", "a deadline is the predicted time of the prompt's chunks times the multiplier", ORDERS),
    _exact("lrs", "relative slack by its formula at any time; two that wait change places as time passes", ORDERS),
    _exact("round_robin", "replicas take turns; those that are down are passed over", ROUTERS),
    _exact("random", "uniform over the replicas that are up", ROUTERS),
    _exact("least_loaded", "the fewest requests, or tokens, by hand; replicas stay even", ROUTERS),
    _exact("power_of_two", "the less loaded of two distinct replicas; the longest of 64 queues is 2 to 3", ROUTERS),
    _exact("pull", "requests are bound late, in order of urgency, by replicas that have room", ROUTERS),
    _exact("prefix_affinity", "a prompt follows its prefix unless loads are too uneven", ROUTERS),
    _exact(
        "endpoint_picker",
        "scores are clamped, weighted and summed over what filters leave; ties are uniform",
        f"{POLICIES}/test_endpoint_picker.py",
    ),
    _exact("micro_requests", "a request that is cut anywhere loses no token", f"{POLICIES}/test_dynaserve.py"),
    _exact("fixed_chunk", "decodes, then prompts by urgency, up to the chunk", f"{POLICIES}/test_fill.py"),
    _exact(
        "dynamic_chunk",
        "each chunk is the largest that keeps the step within its target time",
        f"{POLICIES}/test_target_time_chunks.py",
    ),
    _exact(
        "space_sharing",
        "a long prompt leaves its slack to others, half of a step at most; classes keep to their shares",
        f"{POLICIES}/test_space_sharing.py",
    ),
    _exact(
        "preemptive",
        "the more urgent take slots and memory, no more than they need and never in vain",
        f"{POLICIES}/test_preemptive.py",
    ),
    _exact(
        "token_bucket",
        "in every window of t seconds a tenant gets at most capacity + rate t prompt tokens",
        ADMISSION,
        "bound of the bucket",
    ),
    _exact("max_load", "the bound holds at every moment; the most urgent go in first", ADMISSION),
    _exact("saturation_shedding", "saturation by hand; only what may be shed is shed", ADMISSION),
    _exact("probabilistic_shedding", "requests are shed as often as the formula says", ADMISSION),
    _exact("priority_holdback", "ceilings by hand; the urgent stay fast, and nobody is lost", ADMISSION),
    _exact("soft_reflective_ceiling", "ceilings open every so many cycles, by the formula", ADMISSION),
    *(_exact(one, "eviction order, by hand", KEPT) for one in ("lru", "mru", "lfu", "fifo", "filo", "slru", "ttl")),
    _exact(
        "priority",
        "of cached content, content used only by less urgent requests is evicted first",
        KEPT,
        card="reference/policies.md#priority-of-cached-content",
    ),
    _exact("arc", "content used twice outlives a scan; what is missed moves the target", KEPT),
    _exact(
        "session_pin",
        "a session finds its content again within the time of its pin, and locks no replica up",
        "tests/runtime/test_retention_runs.py",
    ),
    _exact("continuum_pins", "slow tools get no pin", f"{POLICIES}/test_program_order.py"),
    _exact(
        "target_utilization",
        "numbers of Kubernetes' autoscaler, with its windows",
        SCALERS,
        card=f"{SCALING}#target_utilization",
    ),
    _exact("dynamo_planner", "thresholds, budgets and SLOs by hand", SCALERS, card=f"{SCALING}#dynamo_planner"),
]
