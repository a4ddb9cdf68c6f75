"""Requests on their way from replica to replica that wait for each other's blocks: one of them goes on, and all end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from tests.sim.split_pools import POLICIES, nothing_is_left, prepared, settings, simulate
from vajra_py.config import PolicyChoice
from vajra_py.contract import Layer, PolicyConfig, PolicySpec, QueueView, ReplicaId, ReplicaLoadView, RequestView
from vajra_py.contract.observer import EndReason
from vajra_py.errors import PolicyError
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.records.input_log import CacheReset, Failure, PolicyChange
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.workload import RequestSpec


class Router:
    """Assigns requests by turns, but lets replicas pull prompts called "pulled"."""

    def __init__(self) -> None:
        self._num = 0

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """One replica after the other, or none; the second instance assigns everybody to replicas that decode."""
        prompts = [one for one in replicas if one.role != "decode"]
        if prompts and request.request_id.startswith("pulled"):
            return None
        self._num += 1
        able = prompts or replicas
        return able[self._num % len(able)].replica_id

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Whatever waits, for those that compute prompts."""
        return () if replica.role == "decode" else (one.request_id for one in queued)


class RouterOfBoth(Router):
    """Sends each request whose prompt is computed to another replica, be it full or not."""

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """The next replica but the one where it is."""
        others = [one.replica_id for one in replicas if one.replica_id != request.replica_id]
        return others[request.num_prompt_tokens % len(others)]


class Placer(Router):
    """Gives the places that it was made with, one a call, and then none."""

    def __init__(self, *places: ReplicaId | None) -> None:
        super().__init__()
        self._places = list(places)

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """The next of them."""
        return self._places.pop(0) if self._places else None


def with_router(router: Any) -> Registry:
    """The registry with a replicaset scheduler named `router`, new in every run."""
    spec = PolicySpec("router", Layer.REPLICASET_SCHEDULER, PolicyConfig, lambda *_: router(), "Of this test.")
    return load_registry().with_policies([spec])


def small(num_blocks: int, **keys: Any) -> dict[str, Any]:
    """Settings of a pool whose replicas have so many blocks."""
    return {"replica": {"memory": {"num_blocks": num_blocks, "watermark_fraction": 0.0}}, **keys}


def mapping_of(
    pools: dict[str, Any], hand_off: dict[str, Any], replica_scheduler: str = "vllm_v1", **keys: Any
) -> dict[str, Any]:
    """Settings with these pools and this hand-off under the scheduler `router`."""
    scheduling = {**POLICIES, "replicaset_scheduler": "router", "replica_scheduler": replica_scheduler}
    hand_off = {"kv_bytes_per_token": 1_000_000, **hand_off}
    return settings(scheduling=scheduling, pools=pools, hand_off=hand_off, **keys)


@pytest.mark.parametrize("when_full", ["wait", "hold"])
def test_prompts_that_were_pulled_and_prompts_with_blocks_of_their_target_do_not_wait_for_each_other(
    when_full: str,
) -> None:
    """The pulled ones fill their source, and blocks for those that wait there fill the target."""
    mapping = mapping_of(
        {"prefill": small(24), "decode": small(24)}, {"reserve": "before_prompt", "when_full": when_full}
    )
    requests = [
        RequestSpec("pulled-1", 0.0, 160, 20),
        RequestSpec("pulled-2", 0.0, 100, 20),
        RequestSpec("bound-1", 0.001, 200, 20),
        RequestSpec("bound-2", 0.001, 90, 20),
        RequestSpec("bound-3", 0.001, 120, 20),
    ]
    finished = simulate(mapping, requests, registry=with_router(Router))
    assert {way.reason for way in finished.ways.values()} == {EndReason.STOP}
    assert {way.target for way in finished.ways.values()} == {1}
    assert finished.ways["pulled-1"].sent < finished.ways["bound-1"].held  # type: ignore[operator]


def test_a_computed_prompt_takes_blocks_before_those_that_have_not_begun() -> None:
    """It holds blocks of its source, and they hold nothing."""
    mapping = mapping_of({"prefill": small(40), "decode": small(16)}, {"reserve": "before_prompt"})
    requests = [
        RequestSpec("first", 0.0, 200, 20),
        RequestSpec("pulled", 0.0, 100, 20),
        RequestSpec("second", 0.001, 200, 20),
    ]
    ways = simulate(mapping, requests, registry=with_router(Router)).ways
    assert ways["pulled"].sent == pytest.approx(ways["first"].ended)
    assert ways["second"].held > ways["pulled"].sent  # type: ignore[operator]


def test_replicas_that_take_one_request_at_a_time_do_not_wait_for_each_other() -> None:
    """Each is full of what it holds for the other, and has prompts that wait."""
    mapping = mapping_of({"mixed": small(8, num_replicas=2)}, {"reservations": "one_at_a_time"})
    requests = [RequestSpec(f"r{index}", 0.0, 90, 20) for index in range(6)]
    ways = simulate(mapping, requests, registry=with_router(RouterOfBoth)).ways
    assert {way.reason for way in ways.values()} == {EndReason.STOP}


def test_requests_that_leave_do_not_wait_for_each_other_where_one_that_runs_has_no_block() -> None:
    """Its scheduler has nobody else to preempt, and does not preempt it."""
    mapping = mapping_of({"mixed": small(8, num_replicas=2)}, {}, replica_scheduler="preemptive")
    requests = [
        RequestSpec("runs", 0.0, 60, 30),
        RequestSpec("to-its-replica", 0.0, 120, 8),
        RequestSpec("from-its-replica", 0.0, 60, 8),
    ]
    registry = with_router(lambda: Placer(1, None, 0))
    fast, slow = (simulate(mapping, requests, registry=registry, wants_steps=alone) for alone in (False, True))
    assert fast.order == slow.order
    assert {way.reason for way in fast.ways.values()} == {EndReason.STOP}


def test_a_request_that_gives_up_its_kv_is_not_sent_to_and_fro() -> None:
    """Its target is full of its own blocks, and the scheduler there admits nobody without a free one."""
    hand_off = {"first_token": "recompute", "reserve_ahead_tokens": 20}
    mapping = mapping_of({"mixed": small(8, num_replicas=2)}, hand_off, replica_scheduler="fixed_chunk")
    finished = simulate(mapping, [RequestSpec("a", 0.0, 98, 25)], registry=with_router(RouterOfBoth))
    assert finished.ways["a"].reason is EndReason.STOP
    assert [what for what, _, _ in finished.order].count("transfer") == 1


def test_a_request_that_is_told_to_stay_runs_after_the_present_step_of_its_replica() -> None:
    """Also if the replica works out many steps at once."""
    mapping = mapping_of({"mixed": small(20, num_replicas=3)}, {"when_full": "hold"})
    requests = [
        RequestSpec("runs-where-it-is-held", 0.0, 20, 200),
        RequestSpec("fills-the-target", 0.0, 250, 60),
        RequestSpec("frees-a-block", 0.0, 20, 30),
        RequestSpec("held", 0.1, 200, 20),
    ]
    registry = with_router(lambda: Placer(None, None, None, 2, 2, 2))
    fast, slow = (simulate(mapping, requests, registry=registry, wants_steps=alone) for alone in (False, True))
    assert fast.order == slow.order
    assert {way.reason for way in fast.ways.values()} == {EndReason.STOP}


def test_a_scheduler_that_places_nobody_is_named_with_the_pool_that_is_full_of_them() -> None:
    """The replica scheduler of that pool is not: it has no room."""
    mapping = mapping_of({"prefill": small(24), "decode": {}}, {})
    mapping["scheduling"]["request_prioritizer"] = "priority"
    run, simulator, _ = prepared(mapping, registry=with_router(Placer))
    requests = [RequestSpec("waits", 0.0, 320, 20, priority=1), RequestSpec("held", 0.0, 80, 20, priority=0)]
    with pytest.raises(
        PolicyError,
        match=r"router, request held, at 0\.018 s: places no request .* in pool 'prefill' although 2 requests",
    ):
        simulator.run(requests)
    run.controller.check_conservation()


HAND_OFF = st.fixed_dictionaries(
    {
        "reserve": st.sampled_from(["before_prompt", "after_prompt", "at_admission"]),
        "reservations": st.sampled_from(["all_that_fit", "one_at_a_time"]),
        "when_full": st.sampled_from(["wait", "hold", "drop"]),
        "first_token": st.sampled_from(["source", "recompute"]),
        "takes_effect": st.sampled_from(["at_once", "at_step_boundary"]),
        "reserve_ahead_tokens": st.sampled_from([0, 1, 20]),
    }
)
POOLS = st.sampled_from(
    [
        {"mixed": small(8, num_replicas=2)},
        {"mixed": small(14, num_replicas=3)},
        {"mixed": small(14, num_replicas=2), "prefill": small(20)},
        {"mixed": small(14), "prefill": small(20), "decode": small(14)},
    ]
)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 90), st.integers(1, 30), st.booleans()), min_size=2, max_size=25
)


@settings_of_hypothesis(max_examples=60)
@given(HAND_OFF, POOLS, REQUESTS, st.sampled_from(["vllm_v1", "fixed_chunk", "nano_vllm"]), st.sampled_from([2, 8]))
def test_whoever_sends_requests_to_full_replicas_sees_all_of_them_end(
    hand_off: dict[str, Any],
    pools: dict[str, Any],
    drawn: list[tuple[int, int, int, bool]],
    replica_scheduler: str,
    max_batch_size: int,
) -> None:
    """With and without steps that are worked out at once."""
    replica = {"memory": {"num_blocks": 100}, "max_batch_tokens": 128, "max_batch_size": max_batch_size}
    mapping = mapping_of(pools, hand_off, replica_scheduler, replica=replica)
    requests = [
        RequestSpec(f"{'pulled' if is_pulled else 'bound'}-{index}", at / 100, num_prompt, num_output)
        for index, (at, num_prompt, num_output, is_pulled) in enumerate(sorted(drawn))
    ]
    fast, slow = (
        simulate(mapping, requests, registry=with_router(RouterOfBoth), wants_steps=alone) for alone in (False, True)
    )
    assert fast.order == slow.order
    reasons = {EndReason.STOP} if hand_off["when_full"] != "drop" else {EndReason.STOP, EndReason.REJECTED}
    assert {way.reason for way in fast.ways.values()} <= reasons


# Prompts held back until blocks of a decode replica are reserved


def held_back(num_prefill: int, num_decode: int) -> dict[str, Any]:
    """Decode replicas with blocks for one request."""
    decode = {"num_replicas": num_decode, "replica": {"memory": {"num_blocks": 12, "watermark_fraction": 0.0}}}
    hand_off = {"kv_bytes_per_token": 1_000_000, "reserve": "before_prompt"}
    return settings(hand_off=hand_off, pools={"prefill": {"num_replicas": num_prefill}, "decode": decode})


@pytest.mark.parametrize("aborted", [False, True])
def test_a_prompt_to_be_computed_again_is_not_forgotten_when_the_scheduler_is_replaced(aborted: bool) -> None:
    run, simulator, ways = prepared(held_back(2, 2))
    lost_at, at = to_ticks(0.2), to_ticks(0.3)  # r0 decodes on replica 2; then its prompt is held back
    simulator.inject(lost_at, Phase.FAILURE, Failure(lost_at, "default", 2, "lost", max_reruns=3))
    change = PolicyChange("default", Layer.REPLICASET_SCHEDULER, PolicyChoice(policy="least_loaded"))
    simulator.inject(at, Phase.POLICY, change)
    if aborted:
        simulator.abort_at(0.5, "r0")
    simulator.run([RequestSpec(f"r{index}", 0.0, 100, 60) for index in range(4)])
    reasons = [ways.of[f"r{index}"].reason for index in range(4)]
    assert reasons == [EndReason.ABORTED if aborted else EndReason.STOP, *[EndReason.STOP] * 3]
    nothing_is_left(run)


def test_prompts_held_back_are_not_forgotten_when_the_cache_is_reset() -> None:
    run, simulator, ways = prepared(held_back(2, 1))
    at = to_ticks(0.2)  # both prefill replicas are idle
    for replica_id in (0, 1):
        simulator.inject(at, Phase.FAILURE, CacheReset(at, "default", replica_id))
    simulator.run([RequestSpec(f"r{index}", 0.0, 100, 60) for index in range(4)])
    assert {way.reason for way in ways.of.values()} == {EndReason.STOP}
    nothing_is_left(run)


class FailsAtOnce(Router):
    """Cannot take over while requests are served."""

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        raise RuntimeError("bug in plug-in")


@pytest.mark.parametrize("aborted", [False, True])
def test_prompts_held_back_go_on_under_the_old_scheduler_when_a_new_one_is_refused(aborted: bool) -> None:
    spec = PolicySpec("fails", Layer.REPLICASET_SCHEDULER, PolicyConfig, lambda c, x: FailsAtOnce(), "Fails at once.")
    run, simulator, ways = prepared(held_back(1, 1), registry=load_registry().with_policies([spec]))
    refused = []

    def swap(change: PolicyChange) -> None:
        with pytest.raises(PolicyError, match="bug in plug-in"):
            simulator._driver.swap_policy(change)
        refused.append(change)

    simulator.on_policy_change = swap  # type: ignore[method-assign, assignment]
    change = PolicyChange("default", Layer.REPLICASET_SCHEDULER, PolicyChoice(policy="fails"))
    simulator.inject(to_ticks(0.05), Phase.POLICY, change)
    if aborted:
        simulator.abort_at(0.2, "r2")
    simulator.run([RequestSpec(f"r{index}", 0.0, 100, 40) for index in range(3)])
    assert refused == [change]
    reasons = [ways.of[f"r{index}"].reason for index in range(3)]
    assert reasons == [EndReason.STOP, EndReason.STOP, EndReason.ABORTED if aborted else EndReason.STOP]
    nothing_is_left(run)
