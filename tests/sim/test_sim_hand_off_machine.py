"""Random runs over split pools: nothing is lost, whatever happens to requests and replicas on the way."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.sim.split_pools import inject_faults, nothing_is_left, prepared, settings
from vajra_py.contract.observer import EndReason
from vajra_py.plugins import Registry
from vajra_py.workload import PromptContent, RequestSpec

TIMES = st.floats(0.0, 1.5)
NUM_REPLICAS = 4


@st.composite
def requests(draw: st.DrawFn) -> list[RequestSpec]:
    specs = []
    for index in range(draw(st.integers(1, 25))):
        prompt = draw(st.integers(1, 200))
        shared = draw(st.integers(0, prompt))
        parts = tuple(part for part in (("shared", shared), (f"own-{index}", prompt - shared)) if part[1])
        specs.append(
            RequestSpec(
                f"r{index}",
                draw(TIMES),
                prompt,
                draw(st.integers(1, 60)),
                priority=draw(st.integers(0, 2)),
                expires_after_s=draw(st.none() | st.floats(0.01, 0.5)),
                content=PromptContent(parts),
            )
        )
    return sorted(specs, key=lambda one: one.arrived_at)


def _goes_together(rules: dict[str, Any]) -> dict[str, Any]:
    """The rules, without overlap where blocks are not taken before the prompt."""
    return rules if rules["reserve"] == "before_prompt" else rules | {"overlap": "none"}


_RULES = st.fixed_dictionaries(
    {
        "kv_bytes_per_token": st.just(1_000_000),
        "reserve": st.sampled_from(["before_prompt", "after_prompt", "at_admission"]),
        "reservations": st.sampled_from(["all_that_fit", "one_at_a_time"]),
        "when_full": st.sampled_from(["wait", "hold", "retry", "drop"]),
        "retry_interval_s": st.sampled_from([0.01, 0.3]),
        "reserve_ahead_tokens": st.sampled_from([0, 1, 40]),
        "first_token": st.sampled_from(["source", "recompute"]),
        "takes_effect": st.sampled_from(["at_once", "at_step_boundary"]),
        "moves": st.sampled_from(["missing", "whole_prompt"]),
        "overlap": st.sampled_from(["none", "by_layer", "by_chunk", "by_layer"]),
        "overlap_min_tokens": st.sampled_from([0, 60]),
        "num_layers": st.sampled_from([3, 32]),
    }
)
HAND_OFF = _RULES.map(_goes_together).filter(
    lambda one: one["when_full"] != "retry" or (one["takes_effect"], one["reservations"]) == ("at_once", "all_that_fit")
)
LINKS = st.fixed_dictionaries(
    {
        "bandwidth_gb_s": st.sampled_from([None, 0.5, 5.0]),
        "latency_s": st.sampled_from([0.0, 0.004]),
        "contention": st.sampled_from(["max_min", "none", "fixed_share", "exclusive"]),
    }
)
FAULTS = st.lists(st.tuples(st.sampled_from(["abort", "fail", "restart"]), TIMES, st.integers(0, 30)), max_size=12)


def pools_of(router: str, num_blocks: int) -> dict[str, Any]:
    """Two replicas for prompts and two small ones for decodes; replicas that are lent do both."""
    decode = {"num_replicas": 2, "replica": {"memory": {"num_blocks": num_blocks}}}
    if router == "splitwise_mixed_pool":
        return {"prompt": {"role": "mixed", "num_replicas": 2}, "token": {"role": "mixed", **decode}}
    return {"prefill": {"num_replicas": 2}, "decode": decode}


@given(
    specs=requests(),
    hand_off=HAND_OFF,
    links=LINKS,
    num_blocks=st.sampled_from([20, 30, 200]),
    scheduler=st.sampled_from(["vllm_v1", "fixed_chunk", "nano_vllm", "minivllm"]),
    router=st.sampled_from(["round_robin", "round_robin", "splitwise_mixed_pool"]),
    batch_tokens=st.sampled_from([2048, 2048, 70]),
    reservation=st.sampled_from(["prompt", "incremental"]),
    faults=FAULTS,
)
def test_every_request_ends_once_and_every_block_is_free_in_the_end(
    specs: list[RequestSpec],
    hand_off: dict[str, Any],
    links: dict[str, Any],
    num_blocks: int,
    scheduler: str,
    router: str,
    batch_tokens: int,
    reservation: str,
    faults: list[tuple[str, float, int]],
) -> None:
    mapping = settings(
        replica={
            "memory": {"num_blocks": 100, "watermark_fraction": 0.0, "reservation": reservation},
            "max_batch_tokens": batch_tokens,
        },
        scheduling={
            "request_prioritizer": "priority",
            "replicaset_scheduler": router,
            "replica_scheduler": scheduler,
        },
        pools=pools_of(router, num_blocks),
        hand_off=hand_off,
        links=links,
    )
    loses_nothing(mapping, specs, faults)


def loses_nothing(
    mapping: dict[str, Any],
    specs: list[RequestSpec],
    faults: list[tuple[str, float, int]],
    registry: Registry | None = None,
    num_replicas: int = NUM_REPLICAS,
) -> None:
    """Run with these faults, forming every step and not; nothing is lost, and both runs are the same."""
    results = []
    for wants_steps in (False, True):
        run, simulator, ways = prepared(mapping, wants_steps=wants_steps, registry=registry)
        simulator._driver._options = type(simulator._driver._options)(check_every_steps=1)
        inject_faults(simulator, faults, num_replicas)
        simulator.run(specs)
        nothing_is_left(run)
        assert {way.reason for way in ways.of.values()} <= set(EndReason)
        assert all(way.reason is not None for way in ways.of.values())
        results.append((ways.of, ways.order))
    assert results[0] == results[1]
