"""Scaled pools that split prompts and decodes: KV on its way keeps a draining replica up, and nobody is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sim import split_pools
from tests.sim.scaled import Scaled, scaled
from vajra_py.contract import PolicyConfig, PolicyContext, PoolView, ScalerSpec
from vajra_py.contract.observer import EndReason
from vajra_py.errors import PolicyError
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.input_log import Failure, Restart
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.workload import RequestSpec


class Both:
    """Asks for (prefill, decode) replicas from each of some times on."""

    def __init__(self, context: PolicyContext, script: Mapping[float, tuple[int, int]]) -> None:
        self.script = dict(script)
        for at in self.script:
            context.wake.at(at, f"at {at}")

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        """The latest numbers."""
        due = [counts for at, counts in sorted(self.script.items()) if at <= now]
        return dict(zip(("prefill", "decode"), due[-1], strict=True)) if due else {}


def split(script: Mapping[float, tuple[int, int]], counts: tuple[int, int], **more: Any) -> Scaled:
    """Pools of at most three replicas each, whose KV takes a while to move."""
    elastic = {"min_replicas": 0, "max_replicas": 3, "startup_s": more.pop("startup_s", 0.1)}
    elastic["drain"] = more.pop("drain", "wait")
    pools = {
        "prefill": {"num_replicas": counts[0], "elastic": elastic},
        "decode": {"num_replicas": counts[1], "elastic": elastic},
    }
    rules = {
        "hand_off": {"kv_bytes_per_token": 1_000_000, **more.pop("hand_off", {})},
        "links": {"bandwidth_gb_s": 0.2},
        "replica": {"max_batch_size": 4, "max_model_len": 200, "memory": {"num_blocks": more.pop("num_blocks", 30)}},
    }
    return scaled(lambda context: Both(context, script), pools=pools, **(rules | more))


def requests(count: int, *, every_s: float = 0.0) -> list[RequestSpec]:
    return [RequestSpec(f"r{index}", index * every_s, 40, 20) for index in range(count)]


def test_a_prefill_replica_drains_until_its_kv_is_elsewhere() -> None:
    """40 tokens of 1 MB over 200 MB/s take 0.2 s, long after the prompt's only step."""
    world = split({0.05: (1, 1)}, (2, 1), chooser="round_robin")
    seen = world.run(requests(2))
    states = [row for row in seen.changes() if row[1] == 1]
    assert [state for _, _, state in states] == ["draining", "down"]
    assert states[0][0] == 0.05
    assert states[1][0] >= 0.2
    assert {reason for _, reason, _ in seen.ends} == {"stop"}


def test_requests_are_held_until_a_decode_replica_is_up() -> None:
    world = split({0.0: (1, 0), 1.0: (1, 1)}, (1, 0 + 1), chooser="round_robin")
    seen = world.run([RequestSpec("r0", 0.5, 40, 20)])
    (ended,) = seen.ends
    assert ended[1] == "stop"
    assert ended[2] > 1.1 + 0.2


def test_prompts_held_back_for_blocks_of_a_decode_replica_wait_in_the_prefill_pool() -> None:
    world = split({0.1: (1, 1)}, (1, 1), chooser="round_robin", hand_off={"reserve": "before_prompt"}, num_blocks=8)
    replicaset = world.controller.replicasets["default"]
    assert replicaset.scaling is not None
    queued: list[tuple[Any, ...]] = []

    def targets(pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        assert replicaset.num_queued == sum(pool.num_queued for pool in pools)
        assert replicaset.num_queued_tokens == sum(pool.num_queued_tokens for pool in pools)
        queued.append((now, *((pool.num_queued, pool.num_queued_tokens) for pool in pools)))
        return {}

    replicaset.scaling.scaler.targets = targets  # type: ignore[method-assign]
    world.run(requests(5))
    assert (0.1, (3, 120), (0, 0)) in queued


def test_a_prompt_to_be_computed_again_leaves_a_replica_that_drains_by_migration() -> None:
    """Decode replica 2 is lost; its request waits on prefill replica 1, preempted, when that replica drains."""
    memory = {"num_blocks": 100, "watermark_fraction": 0.0}
    elastic = {"max_replicas": 2, "drain": "migrate"}
    mapping = split_pools.settings(
        scheduling={**split_pools.POLICIES, "scaling": "both"},
        hand_off={"kv_bytes_per_token": 1_000_000, "reserve": "before_prompt"},
        replica={"memory": memory, "max_batch_size": 1, "max_batch_tokens": 1000},
        pools={
            "prefill": {"num_replicas": 2, "elastic": elastic},
            "decode": {"num_replicas": 2, "elastic": elastic, "replica": {"memory": {**memory, "num_blocks": 1000}}},
        },
    )
    script = {0.0: (2, 2), 0.46: (1, 2)}
    scaler = ScalerSpec("both", PolicyConfig, lambda config, context: Both(context, script), "Follows a script.")
    run, simulator, ways = split_pools.prepared(mapping, registry=load_registry().with_policies([scaler]))
    lost_at = to_ticks(0.45)
    simulator.inject(lost_at, Phase.FAILURE, Failure(lost_at, "default", 2, "lost", max_reruns=3))
    long = [RequestSpec(f"long {index}", 0.4 + 0.001 * index, 700, 5) for index in range(5)]
    simulator.run([RequestSpec("a", 0.0, 100, 300), *long, RequestSpec("late", 0.452, 700, 5)])
    assert {way.reason for way in ways.of.values()} == {EndReason.STOP}
    split_pools.nothing_is_left(run)


def test_a_decode_pool_without_replicas_is_named() -> None:
    world = split({0.0: (1, 0)}, (1, 1), chooser="round_robin")
    with pytest.raises(
        PolicyError, match=r"tested.*leaves replicaset 'default' without an active replica that could continue"
    ):
        world.run([RequestSpec("r0", 0.5, 40, 20)])


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    times = st.floats(0.0, 2.0).map(lambda at: round(at, 3))
    pairs = st.tuples(st.integers(0, 3), st.integers(0, 3))
    return {
        "script": draw(st.dictionaries(times, pairs, max_size=6)) | {3.0: (draw(st.integers(1, 3)), draw(st.integers(1, 3)))},
        "counts": (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        "startup_s": draw(st.sampled_from([0.0, 0.013, 0.3])),
        "drain": draw(st.sampled_from(["wait", "migrate"])),
        "num_blocks": draw(st.sampled_from([8, 12, 30])),
        "chooser": draw(st.sampled_from(["round_robin", "least_loaded", "power_of_two"])),
        "hand_off": {
            "when_full": draw(st.sampled_from(["wait", "hold"])),
            "reserve": draw(st.sampled_from(["before_prompt", "after_prompt", "at_admission"])),
            "first_token": draw(st.sampled_from(["source", "recompute"])),
            "takes_effect": draw(st.sampled_from(["at_once", "at_step_boundary"])),
        },
        "arrivals": sorted(draw(st.lists(times, min_size=1, max_size=20))),
        "outputs": draw(st.lists(st.integers(1, 60), min_size=20, max_size=20)),
        "aborts": draw(st.lists(st.tuples(times, st.integers(0, 19)), max_size=4)),
        "losses": draw(st.lists(st.tuples(times, st.sampled_from([0, 1, 3, 4])), max_size=3)),
    }  # fmt: skip


def run(given: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """What is observed of a drawn case; each loss is repaired a second later."""
    world = split(
        given["script"], given["counts"], startup_s=given["startup_s"], num_blocks=given["num_blocks"],
        drain=given["drain"],
        chooser=given["chooser"], hand_off=given["hand_off"], options=SimulationOptions(check_every_steps=1, **options),
    )  # fmt: skip
    for at, index in given["aborts"]:
        world.simulator.abort_at(at, f"r{index}")
    for at, replica_id in given["losses"]:
        tick = to_ticks(at)
        world.simulator.inject(tick, Phase.FAILURE, Failure(tick, "default", replica_id, "lost", 5))
        back = to_ticks(at + 1.0)
        world.simulator.inject(back, Phase.FAILURE, Restart(back, "default", replica_id))
    specs = [RequestSpec(f"r{i}", at, 40, given["outputs"][i]) for i, at in enumerate(given["arrivals"])]
    seen = world.run(specs)
    assert len(seen.ends) == len(specs)
    for replica in world.controller.replicas():
        assert replica.memory.free_blocks == replica.memory.num_blocks
        assert replica.is_empty
    return seen.states, seen.ends, seen.admitted


ADMITTED_WHILE_DRAINING = {
    "script": {0.0: (0, 3), 0.083: (2, 2), 0.5: (1, 1)}, "counts": (2, 3), "startup_s": 0.013, "drain": "migrate",
    "num_blocks": 12, "chooser": "power_of_two",
    "hand_off": {"when_full": "wait", "reserve": "at_admission", "first_token": "source", "takes_effect": "at_step_boundary"},
    "arrivals": [0.0, 0.029], "outputs": [3, 3], "aborts": [], "losses": [],
}  # fmt: skip
"""The KV of a request reaches a replica that drains meanwhile: after its first step there, the request moves on."""


@settings(deadline=None, max_examples=40)
@given(worlds())
@example(ADMITTED_WHILE_DRAINING)
def test_no_request_and_no_block_is_lost_and_equal_runs_are_equal(given: dict[str, Any]) -> None:
    observed = run(given)
    assert {reason for _, reason, _ in observed[1]} <= {"stop", "aborted"}
    assert run(given) == observed
    assert run(given, fast_forward=False) == observed
